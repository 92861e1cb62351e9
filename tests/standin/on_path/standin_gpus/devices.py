"""``torch.cuda``: which devices there are, and which one is current."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda

from standin_gpus.library import (
    MEMORY_BYTES,
    NUM_DEVICES,
    current_device,
    device_index,
    exchange_device,
    set_current_device,
)

_initialized_in: list[int] = []
"""The process that initialized CUDA: its children by fork must not use it."""


def apply() -> None:
    """Patches devices."""
    for name, function in {
        "_cuda_init": _init,
        "_cuda_isInBadFork": _is_in_bad_fork,
        "_cuda_getDeviceCount": lambda: NUM_DEVICES,
        "_cuda_getDevice": current_device,
        "_cuda_setDevice": set_current_device,
        "_cuda_exchangeDevice": exchange_device,
        "_cuda_maybeExchangeDevice": exchange_device,
        "_cuda_synchronize": torch.accelerator.synchronize,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_emptyCache": lambda *_: None,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_getCompiledVersion": lambda: 12060,
    }.items():
        setattr(torch._C, name, function)
    for name, function in {
        "_is_in_bad_fork": _is_in_bad_fork,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "_cudart": SimpleNamespace(
            cudaGetErrorString=str,
            cudaError=SimpleNamespace(success=0),
            cudaMemGetInfo=lambda _: (MEMORY_BYTES, MEMORY_BYTES),
        ),
        "is_available": lambda: True,
        "device_count": lambda: NUM_DEVICES,
        "current_device": _current_device,
        "set_device": _set_device,
        "synchronize": _synchronize,
        "get_device_properties": _properties,
        "get_device_name": lambda device=None: _properties(device).name,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
    }.items():
        setattr(torch.cuda, name, function)
    torch.backends.cuda.is_built = lambda: True


def _init() -> None:
    _initialized_in[:] = [os.getpid()]


def _is_in_bad_fork() -> bool:
    return bool(_initialized_in) and _initialized_in[0] != os.getpid()


def _current_device() -> int:
    torch.cuda._lazy_init()
    return current_device()


def _set_device(device: Any) -> None:
    torch.cuda._lazy_init()
    exchange_device(device_index(device))


def _synchronize(device: Any = None) -> None:
    torch.cuda._lazy_init()
    torch.accelerator.synchronize(device_index(device))


def _properties(device: Any = None) -> SimpleNamespace:
    torch.cuda._lazy_init()
    index = device_index(device)
    if not 0 <= index < NUM_DEVICES:
        raise AssertionError("Invalid device id")
    return SimpleNamespace(
        name="Stand-in GPU",
        total_memory=MEMORY_BYTES,
        major=9,
        minor=0,
        multi_processor_count=132,
        is_integrated=0,
        warp_size=32,
        gcnArchName="",
        # Hosts of a test are processes of one machine; each says which host it plays.
        uuid=f"{os.environ.get('LIGHTNING_GPP_STANDIN_HOST', '')}GPU-{index}",
    )
