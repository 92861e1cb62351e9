"""Speeds of devices and their collectives.

Collectives are alpha-beta each, by bytes. They are estimated from the cluster's links, or measured
where the devices are at hand: then the numbers are given instead. Rings, as in
:mod:`lightning_gpp.cluster.collectives`; what a ring's slowest channel takes is what every round
takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_gpp.cluster import Cluster
from lightning_gpp.cluster.collectives import ring_lines, rounds_s, tree_all_reduce_s

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSpeeds:
    """Sustained speeds of all devices; arrays of shape ``(num_devices,)``.

    Attributes:
        flops_per_s: of products of matrices.
        memory_bytes_per_s: of reading and writing.
        launch_s: seconds of an operator at least.
        update_s_per_byte: seconds of the optimizer's step per byte of a parameter; zeros where
            nothing is known of it.
    """

    flops_per_s: Vector
    memory_bytes_per_s: Vector
    launch_s: Vector
    update_s_per_byte: Vector

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares in proportion to the flops."""
        return tuple((self.flops_per_s / self.flops_per_s.sum()).tolist())


def device_speeds(cluster: Cluster) -> DeviceSpeeds:
    """Speeds in float32 from the data sheets of the cluster's devices.

    Raises:
        ValueError: there is no data sheet of a kind of device, or not of float32.
    """
    kinds = [cluster.device_kind(device.kind) for device in cluster.devices]
    return DeviceSpeeds(
        np.array([kind.flops_per_s("float32") for kind in kinds]),
        np.array([kind.memory_bytes_per_s for kind in kinds]),
        np.array([kind.launch_s for kind in kinds]),
        np.zeros(len(kinds)),
    )


def measured_speeds(
    flops_per_s: ArrayLike,
    memory_bytes_per_s: ArrayLike = np.inf,
    launch_s: ArrayLike = 0.0,
    update_s_per_byte: ArrayLike = 0.0,
) -> DeviceSpeeds:
    """Speeds that were measured, one number per device.

    Args:
        flops_per_s: of products of matrices.
        memory_bytes_per_s: without limit if not given.
        launch_s: nothing if not given.
        update_s_per_byte: likewise.
    """
    flops = np.array(flops_per_s, dtype=float)
    given = memory_bytes_per_s, launch_s, update_s_per_byte
    return DeviceSpeeds(flops, *(np.zeros(len(flops)) + np.array(each, float) for each in given))


PROBE_BYTES = 1e12
"""A message so large that its latency does not count: gives the slope of a cost."""


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """A cost that grows with bytes.

    Attributes:
        alpha_s: seconds at least.
        beta_s_per_byte: seconds per byte.
    """

    alpha_s: float = 0.0
    beta_s_per_byte: float = 0.0

    def seconds(self, size_bytes: float) -> float:
        """Seconds for so many bytes; nothing for none."""
        return self.alpha_s + self.beta_s_per_byte * size_bytes if size_bytes else 0.0

    def in_bucket_s(self, size_bytes: float, bucket_bytes: float) -> float:
        """Seconds for bytes that travel with others, latency by the part that they are of them."""
        part = min(1.0, size_bytes / bucket_bytes)
        return self.alpha_s * part + self.beta_s_per_byte * size_bytes


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Seconds of collectives over all devices.

    Attributes:
        all_reduce: by the bytes of the tensor.
        all_gather: padded; by the bytes of what is gathered, padding included (devices times the
            largest shard).
        reduce_scatter: likewise.
        all_to_all: by the bytes of the tensor as it would be if all shards were as the largest.
        broadcast: from one device to all; by bytes.
        reduce: from all to one device, by bytes.
        root: shards between rank 0 and the others (scatter, gather), by the bytes of the tensor.
    """

    all_reduce: AlphaBeta
    all_gather: AlphaBeta
    reduce_scatter: AlphaBeta
    all_to_all: AlphaBeta
    broadcast: AlphaBeta
    reduce: AlphaBeta
    root: AlphaBeta
    small_all_reduce: AlphaBeta | None = None
    """The all-reduce of few rounds (a tree) that libraries take for small tensors."""

    def all_reduce_s(self, size_bytes: float) -> float:
        """An all-reduce by the better algorithm."""
        found = self.all_reduce.seconds(size_bytes)
        if self.small_all_reduce is None:
            return found
        return min(found, self.small_all_reduce.seconds(size_bytes))


def collective_times(cluster: Cluster) -> CollectiveTimes:
    """Estimates from a cluster's links.

    >>> from lightning_gpp.cluster import Link, uniform_cluster
    >>> times = collective_times(uniform_cluster(4, Link(1e9, latency_s=0.001)))
    >>> times.all_gather.seconds(4e6), times.all_reduce.seconds(4e6)
    (0.006, 0.012)
    """
    num_devices = cluster.num_devices
    if num_devices == 1:
        nothing = AlphaBeta()
        return CollectiveTimes(*(nothing,) * 7)
    devices = range(num_devices)
    lines = ring_lines(cluster, devices)
    ring = AlphaBeta(max(line[0] for line in lines), max(line[1] for line in lines))
    half = AlphaBeta(ring.alpha_s / 2, ring.beta_s_per_byte / 2)
    # A pipelined chain: as many hops as a half ring has rounds, all bytes over every link.
    chain = AlphaBeta(half.alpha_s, half.beta_s_per_byte * num_devices / (num_devices - 1))
    shifts = [
        [(source, (source + shift) % num_devices) for source in devices]
        for shift in range(1, num_devices)
    ]
    exchange = _line(lambda size: rounds_s(cluster, shifts, size / num_devices**2))
    shards = [[(0, target) for target in devices[1:]]]
    tree_alpha = tree_all_reduce_s(cluster, devices, 1.0)
    return CollectiveTimes(
        all_reduce=ring,
        all_gather=half,
        reduce_scatter=half,
        all_to_all=exchange,
        broadcast=chain,
        reduce=chain,
        root=_line(lambda size: rounds_s(cluster, shards, size / num_devices)),
        small_all_reduce=AlphaBeta(
            tree_alpha,
            (tree_all_reduce_s(cluster, devices, PROBE_BYTES) - tree_alpha) / PROBE_BYTES,
        ),
    )


def _line(seconds: Callable[[float], float]) -> AlphaBeta:
    alpha_s = seconds(0.0)
    return AlphaBeta(alpha_s, (seconds(PROBE_BYTES) - alpha_s) / PROBE_BYTES)


@dataclass(frozen=True, eq=False)
class Machine:
    """The devices of a program.

    Attributes:
        speeds: how fast each computes.
        times: of collectives over all of them.
        memory_bytes: of each, shape ``(num_devices,)``; infinite where there is no limit.
        optimizer_tensors: tensors of a parameter's size that training holds beside it, its gradient
            included (Adam: 3, SGD: 1).
        is_training: whether there is a backward.
    """

    speeds: DeviceSpeeds
    times: CollectiveTimes
    memory_bytes: Vector
    optimizer_tensors: int = 3
    is_training: bool = True

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.memory_bytes)

    @cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """The devices in groups of equal speeds and memory, by the first of each."""
        columns = [getattr(self.speeds, of.name) for of in fields(self.speeds)]
        found: dict[tuple[float, ...], list[int]] = {}
        for device, key in enumerate(zip(*columns, self.memory_bytes)):
            found.setdefault(key, []).append(device)
        return tuple(map(tuple, found.values()))
