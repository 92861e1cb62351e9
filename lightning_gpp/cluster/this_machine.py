"""This machine's processor as a device: cores and memory as reported, speeds as measured.

Devices of a CPU cluster are processes that share the machine, so each gets an equal part of it.
"""

from __future__ import annotations

import operator
import os
import platform
import timeit
from collections.abc import Callable
from functools import cache, partial

from lightning_gpp.cluster.cluster import DEFAULT_LINK, Cluster
from lightning_gpp.cluster.device_kind import DeviceKind
from lightning_gpp.cluster.layout import ClusterLayout, HostGroup
from lightning_gpp.common.checks import check_whole

CPU = "cpu"
"""Kind of the devices of a CPU."""

CPU_LAUNCH_S = 5e-6
"""Seconds that a framework needs for one operator on a CPU, assumed: the order of magnitude."""

COPIED_BYTES = 64 * 2**20
"""Larger than caches, so that copies measure the memory."""

MATRIX_SIZE = 768
"""Rows of the square matrices whose product is timed; some milliseconds each."""

REPEATS = 3
"""The fastest counts: others were disturbed."""


def num_cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_memory_bytes() -> int | None:
    """Memory of this machine, or of the container where that is less; None: it does not say."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def cpu_cluster(num_devices: int | None = None) -> Cluster:
    """Processes of this machine, one per core if not given, with gloo between them.

    Raises:
        ValueError: ``num_devices`` is below 1.
    """
    count = num_cores() if num_devices is None else num_devices
    check_whole("num_devices", count)
    group = HostGroup(CPU, devices_per_host=count)
    return ClusterLayout((group,), DEFAULT_LINK, device_kinds=(cpu_kind(count),)).cluster(count)


def cpu_kind(num_processes: int = 1) -> DeviceKind:
    """The share of one of so many processes of this machine's processor, measured (0.1 s)."""
    memory_bytes = host_memory_bytes()
    flops_per_s = {name: speed / num_processes for name, speed in _flops_per_s().items()}
    return DeviceKind(
        name=CPU,
        peak_flops_per_s=flops_per_s,
        peak_memory_bytes_per_s=_copy_bytes_per_s() / num_processes,
        memory_bytes=None if memory_bytes is None else memory_bytes // num_processes,
        launch_s=CPU_LAUNCH_S,
        source=(
            f"measured: products of matrices, copies of memory; {num_cores()} cores of "
            f"{platform.machine()} shared by {num_processes}; launch: assumed"
        ),
    )


@cache
def _flops_per_s() -> dict[str, float]:
    """Operations per second, by dtype, of this process's matrix products."""
    import numpy as np  # takes 0.1 s to load, and few plans ask for this machine

    found = {}
    for dtype in ("float32", "float64"):
        matrix = np.ones((MATRIX_SIZE, MATRIX_SIZE), dtype)
        found[dtype] = 2 * MATRIX_SIZE**3 / _fastest_s(partial(operator.matmul, matrix, matrix))
    return found


@cache
def _copy_bytes_per_s() -> float:
    """Bytes that this process reads and writes per second when it copies."""
    source, target = bytearray(COPIED_BYTES), memoryview(bytearray(COPIED_BYTES))

    def copy() -> None:
        target[:] = source

    return 2 * COPIED_BYTES / _fastest_s(copy)


def _fastest_s(work: Callable[[], object]) -> float:
    return min(timeit.repeat(work, number=1, repeat=REPEATS))
