"""One interface to what torch spells differently for each type of device.

An accelerator is whatever :mod:`torch.accelerator` drives: GPUs of NVIDIA, AMD (``cuda`` for torch,
too), Intel (``xpu``) and Apple (``mps``), and what plug-ins of torch add.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def is_accelerator(device: torch.device) -> bool:
    """Whether work on it is queued, and is not over when a call returns."""
    return device.type not in ("cpu", "meta")


def synchronize(device: torch.device) -> None:
    """Waits for what this thread has queued on a device.

    Sums and messages go on beside it: they may need another rank, which may wait for this thread.
    """
    if device.type == "mps":  # has one stream, for which torch has no wait of its own
        torch.accelerator.synchronize(device)
    elif is_accelerator(device):
        torch.accelerator.current_stream(device).synchronize()


def set_current(device: torch.device) -> None:
    """Makes an accelerator the current one of this thread."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def current_stream(device: torch.device) -> torch.Stream | None:
    """What this thread's work on an accelerator is queued on."""
    return torch.accelerator.current_stream(device) if is_accelerator(device) else None


# What a device is --------------------------------------------------------------------------------


def device_name(device: torch.device) -> str:
    """The maker's name of a device, or its type where torch knows none (CPUs, Apple's GPUs)."""
    return str(getattr(_properties(device), "name", device.type))


def device_uuid(device: torch.device) -> str | None:
    """Tells it from every other device, however processes number theirs; None if it has none."""
    uuid = getattr(_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


def memory_bytes(device: torch.device) -> int | None:
    """The device's own memory; None if it has none (CPUs, Apple's GPUs) or torch does not know."""
    size_bytes: int | None = getattr(_properties(device), "total_memory", None)
    return size_bytes


def free_bytes(device: torch.device) -> int | None:
    """The free part of the device's own memory; None if it has none or torch does not know."""
    look = getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if look is None else int(look(device)[0])


def room_bytes(device: torch.device) -> int | None:
    """The device's own memory that this process may use, including what it already uses."""
    free = free_bytes(device)
    return None if free is None else free + torch.get_device_module(device).memory_reserved(device)


def widened(tensor: Tensor) -> Tensor:
    """In the widest floating-point format that its device computes in: not all know float64."""
    return tensor.to(widest_float(tensor.device))


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on Apple's GPUs and some of Intel's."""
    has_float64 = device.type != "mps" and getattr(_properties(device), "has_fp64", True)
    return torch.float64 if has_float64 else torch.float32


def _properties(device: torch.device) -> Any:
    """What torch tells of an accelerator; None if nothing."""
    if not is_accelerator(device):
        return None
    ask = getattr(torch.get_device_module(device), "get_device_properties", None)
    return None if ask is None else ask(device)


# What goes with every type in use ----------------------------------------------------------------


def types_in_use() -> tuple[str, ...]:
    """The CPU, and the accelerator that this torch was built for."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def accelerator_random_states() -> dict[torch.device, Tensor]:
    """The states of the random generators of all accelerators, if any is in use."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return {}
    module = torch.get_device_module(accelerator)
    if not getattr(module, "is_initialized", module.is_available)():
        return {}
    devices = [torch.device(accelerator.type, index) for index in range(module.device_count())]
    return {device: module.get_rng_state(device) for device in devices}


def set_accelerator_random_states(states: dict[torch.device, Tensor]) -> None:
    """Puts back what :func:`accelerator_random_states` gave."""
    for device, state in states.items():
        torch.get_device_module(device).set_rng_state(state, device)


def forked_random(device: torch.device) -> AbstractContextManager[None]:
    """On exit the random generators of the CPU and of a device are as they were."""
    devices, kind = ([device], device.type) if is_accelerator(device) else ([], "cpu")
    return torch.random.fork_rng(devices, device_type=kind)
