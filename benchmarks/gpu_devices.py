"""The device of a process of ``benchmarks/gpu.py``, and what it shows alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_cases import Case, Place
from measuring import quiet

from lightning_gpp.cluster.device_kind import DEVICE_KINDS
from lightning_gpp.strategy.spmd.planners import measure_speeds


def own_device(place: Place) -> torch.device:
    """Of this process, which has it to itself as far as threads go, and says only errors."""
    quiet()
    device = torch.device(place.devices[place.rank])
    if device.type == "cuda":
        torch.set_num_threads(os.cpu_count() or 1)
        torch.cuda.set_device(device)
    return device


def wait(device: torch.device) -> None:
    """Until a device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def join(place: Place) -> None:
    """Connects the processes of a place, as the strategies do."""
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if place.accelerator == "gpu" else "gloo")


def speeds(place: Place, case: Case, folder: Path) -> dict[str, Any]:
    """What ``hap`` takes this device for, what large work shows of it, and its data sheet.

    The option ``side`` is that of the large matrices.
    """
    device = own_device(place)
    found = measure_speeds(device)
    side = case.options["side"]
    one, other = torch.randn(side, side, device=device), torch.empty(side, side, device=device)
    flops_per_s = 2 * side**3 / _once_s(lambda: torch.mm(one, one, out=other), device)
    bytes_per_s = 2 * one.nbytes / _once_s(lambda: other.copy_(one), device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    sheet = DEVICE_KINDS.get(name)
    return {
        "hap": [float(found.flops_per_s[0]), float(found.memory_bytes_per_s[0])],
        "launch_s": float(found.launch_s[0]),
        "large": [flops_per_s, bytes_per_s],
        "sheet": sheet and [sheet.peak_flops_per_s["float32"], sheet.peak_memory_bytes_per_s],
    }


def _once_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of something, of ten in a row."""
    for is_warm in (False, True):
        wait(device)
        start_s = time.perf_counter()
        for _ in range(10 if is_warm else 2):
            work()
        wait(device)
    return (time.perf_counter() - start_s) / 10
