"""``torch.cuda.memory``: what the library's allocator holds."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.cuda

from standin_gpus.library import LIBRARY, MEMORY_BYTES, device_index

_KINDS = ("allocated", "reserved", "active", "requested", "inactive_split")
_POOLS = ("all", "small_pool", "large_pool")


def apply() -> None:
    """Patches the figures of memory."""
    for name, function in {
        "memory_stats": _stats,
        "memory_allocated": _now,
        "memory_reserved": _now,
        "max_memory_allocated": _peak,
        "max_memory_reserved": _peak,
        "reset_peak_memory_stats": _reset_peak,
        "mem_get_info": lambda device=None: (MEMORY_BYTES - _now(device), MEMORY_BYTES),
        "empty_cache": lambda: None,
    }.items():
        setattr(torch.cuda, name, function)
        setattr(torch.cuda.memory, name, function)


def _now(device: Any = None) -> int:
    return LIBRARY.standin_allocated_bytes(device_index(device))


def _peak(device: Any = None) -> int:
    return LIBRARY.standin_peak_bytes(device_index(device))


def _reset_peak(device: Any = None) -> None:
    LIBRARY.standin_reset_peak(device_index(device))


def _stats(device: Any = None) -> OrderedDict[str, int]:
    now, peak = _now(device), _peak(device)
    values = {"current": now, "peak": peak, "allocated": now, "freed": 0}
    stats = OrderedDict(
        (f"{kind}_bytes.{pool}.{name}", value)
        for kind in _KINDS
        for pool in _POOLS
        for name, value in values.items()
    )
    stats.update({"num_alloc_retries": 0, "num_ooms": 0, "num_sync_all_streams": 0})
    return stats
