"""Makes the SPMD program of a run for its devices.

Devices and collectives are timed on the machine at hand, when a run begins. An accelerator is given
as much as fills it, many times in a row, and is waited for once: a wait after each would time
launches, and what fits into its cache would not time its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from lightning_gpp.cluster import Cluster
from lightning_gpp.common.torch_device import is_accelerator, synchronize
from lightning_gpp.spmd.costs.machine import (
    AlphaBeta,
    CollectiveTimes,
    DeviceSpeeds,
    Machine,
    collective_times,
    device_speeds,
    measured_speeds,
)
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.placement import PARTIAL, R_SUMMED, Placement, shard
from lightning_gpp.spmd.plan import plan_hap
from lightning_gpp.spmd.program import SpmdProgram
from lightning_gpp.spmd.rules.theory import Theory
from lightning_gpp.spmd.run.moves import Collectives, Mover, Shards
from lightning_gpp.spmd.search.choices import Allowed, DataParallel
from lightning_gpp.spmd.search.find import find_program
from lightning_gpp.strategy.devices.devices_at_hand import (
    DeviceAtHand,
    cluster_at_hand,
    resolve_cluster,
)
from lightning_gpp.strategy.pipelined_run import PipelinedRun

ProgramPlanner = Callable[[SpmdGraph, Sequence[float], Mapping[str, Placement] | None], SpmdProgram]
"""Graph, share of every device, and how parameters are stored (None: to be decided) -> program."""

_UPDATE_PASSES = 7
"""Over the memory of a parameter, in a step of Adam: reads four tensors, writes three."""


def machine_of(
    cluster: Cluster,
    measured: DeviceSpeeds | None,
    times: CollectiveTimes | None = None,
) -> Machine:
    """The devices as prices see them.

    Args:
        cluster: of the run.
        measured: speeds of its devices; by their data sheets where not given.
        times: measured ones of collectives; by the cluster's links where not given.
    """
    sizes = [device.memory_bytes for device in cluster.devices]
    limits = np.array([np.inf if size is None else float(size) for size in sizes])
    speeds = measured or device_speeds(cluster)
    return Machine(speeds, times or collective_times(cluster), limits)


@dataclass(frozen=True, slots=True)
class HapPlanner:
    """Searches programs for some devices.

    Attributes:
        machine: the devices.
        has_shares: whether the user gave shares; otherwise they are found with the program.
        is_data_parallel: whether only samples are divided, by the given shares.
    """

    machine: Machine
    has_shares: bool
    is_data_parallel: bool = False

    def __call__(
        self,
        graph: SpmdGraph,
        shares: Sequence[float],
        storage: Mapping[str, Placement] | None,
    ) -> SpmdProgram:
        """The program of an export.

        Raises:
            NoProgramFitsError: no program with these shares fits the memory of all devices.
        """
        is_training = any(value.requires_grad for value in graph.values)
        machine = replace(self.machine, is_training=is_training)
        if storage is None and not (self.has_shares or self.is_data_parallel):
            return plan_hap(graph, machine).program
        theory = Theory(graph, machine.num_devices)
        allowed = DataParallel(graph, theory) if self.is_data_parallel else Allowed(storage)
        return find_program(
            *(graph, machine, tuple(shares), theory),
            allowed=allowed,
            limits_memory=storage is None,  # what is divided already stays so, if it fits or not
            name="data parallel" if self.is_data_parallel else "hap",
        ).program


def planner_for(
    run: PipelinedRun, group: Collectives, name: str, has_shares: bool
) -> HapPlanner | None:
    """All ranks: on rank 0 a planner for the devices that there are or the user describes.

    Args:
        run: of this rank.
        group: the ranks.
        name: ``"data_parallel"`` divides samples by the given shares, and nothing else.
        has_shares: whether the user gave shares.
    """
    devices = run.control.gather(DeviceAtHand.of(run.device), "collecting the devices")
    chosen, num_ranks = run.settings.cluster, run.control.num_ranks
    is_data_parallel = name == "data_parallel"
    speeds = times = None
    if chosen is None:
        # Where samples are divided by the shares that there are, speeds decide nothing; any do
        # beside which a collective's seconds are not lost in rounding.
        speeds = measured_speeds(np.full(num_ranks, 1e12))
        if not is_data_parallel:
            speeds = measure_speeds(run.device, group)
            speeds = replace(speeds, update_s_per_byte=_UPDATE_PASSES / speeds.memory_bytes_per_s)
        times = measure_collectives(group, run.device)
    if not run.control.is_leader:
        return None  # only rank 0 plans
    cluster = cluster_at_hand(devices) if chosen is None else resolve_cluster(chosen, num_ranks)
    return HapPlanner(machine_of(cluster, speeds, times), has_shares, is_data_parallel)


_SIDE, _ACCELERATOR_SIDE = 384, 4096
"""Of the matrices whose product is timed: on a CPU some milliseconds on a slow core; an accelerator
has to be full."""

_COPIED_BYTES, _ACCELERATOR_COPIED_BYTES = 1 << 24, 1 << 28
"""More than the caches of a core; and of an accelerator (50 MB on an H100)."""

_GOLDEN = 0.6180339887
"""The fractions of its multiples are spread over [0, 1)."""

_STRETCH_S = 0.1
"""Of every kind of work in a round: many time slices of a scheduler, so that a core that others
use, too, looks as slow as it is."""

ROUNDS = 6


def measure_speeds(device: torch.device, group: Collectives | None = None) -> DeviceSpeeds:
    """All ranks: how fast each device is while all of them compute; all ranks get the same.

    What a device is busy with beside this may come and go. So all are timed in short rounds that
    they begin together, of which the median counts.

    Args:
        device: of this rank.
        group: the ranks; this device alone if not given.
    """
    is_large = is_accelerator(device)
    side = _ACCELERATOR_SIDE if is_large else _SIDE
    row = torch.arange(1, side + 1, device=device) * _GOLDEN % 1
    square = row.outer(row)  # numbers that are all alike take less power: clocks would be high
    long_bytes = _ACCELERATOR_COPIED_BYTES if is_large else _COPIED_BYTES
    long, short = torch.ones(long_bytes // 4, device=device), torch.ones(1, device=device)
    # Results are written into memory that there is: new pages take longer than what is written.
    product, added = torch.empty_like(square), torch.empty_like(long)
    works: list[Callable[[], object]] = [
        lambda: torch.mm(square, square, out=product),
        lambda: torch.add(long, 1, out=added),
        lambda: torch.add(short, 1),
    ]
    counts = [_count(work, device) for work in works]

    def measured() -> list[float]:
        return [_seconds(w, device, n) / n for w, n in zip(works, counts, strict=True)]

    rounds = [_of_all(measured(), group, device) for _ in range(ROUNDS)]
    product_s, add_s, launch_s = np.median(rounds, axis=0).T
    return measured_speeds(2 * side**3 / product_s, 2 * long_bytes / add_s, launch_s)


def _of_all(own: list[float], group: Collectives | None, device: torch.device) -> list[list[float]]:
    """Times of all ranks; they begin the next round together."""
    if group is None:
        return [own]
    tensor, count = torch.tensor(own, dtype=torch.float32, device=device), group.num_ranks
    shapes = [(len(own),)] * count
    every = group.all_to_all([tensor] * count, shapes, purpose="timing the devices")
    return [each.tolist() for each in every]


def _count(work: Callable[[], object], device: torch.device) -> int:
    """How often the work fills its part of a round."""
    count = 1
    while _seconds(work, device, count) < _STRETCH_S / 2:
        count *= 2
    return count


def _seconds(work: Callable[[], object], device: torch.device, count: int) -> float:
    """What so much work takes; an accelerator, by its own clock, is waited for once."""
    if not is_accelerator(device):
        start_s = time.perf_counter()
        for _ in range(count):
            work()
        return time.perf_counter() - start_s
    stream = torch.accelerator.current_stream(device)
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    start.record(stream)
    for _ in range(count):
        work()
    end.record(stream)
    synchronize(device)  # a wait for the event spoils its time on Apple's GPUs before torch 2.14
    return float(start.elapsed_time(end)) / 1e3


# Collectives -------------------------------------------------------------------------------------

SMALL_BYTES, LARGE_BYTES, MOST_BYTES = 1 << 12, 1 << 22, 1 << 26
"""Hardly more than latency; enough for the bandwidth to show of a wire (30 ms by 1 Gbit/s); and of
links between GPUs (0.2 ms by 300 GB/s)."""

_SHOWS = 8
"""The bandwidth shows where a large message takes this many times as long as a small one."""

_REPEATS = 5


def measure_collectives(group: Collectives, device: torch.device) -> CollectiveTimes:
    """All ranks: lines through the times of a small and a large tensor, a line per collective.

    The large one is as large as it takes for the bandwidth to show. All ranks get the same: a
    collective takes as long as on the slowest rank.
    """
    count = group.num_ranks
    mover = Mover(group, Shards((1 / count,) * count), device)
    rows, columns = shard(0, count), shard(1, count)

    def line(source: Placement | None, target: Placement | None) -> AlphaBeta:
        """A move; None is rank 0, which has all of it."""

        def seconds(size_bytes: int) -> float:
            whole = count, count * -(-size_bytes // (4 * count**2))
            shape = mover.shards.shape(whole, source or R_SUMMED, mover.rank)
            part = torch.zeros(shape if source or mover.rank == 0 else 0, device=device)
            move = partial(mover.move, part, whole, source, target, "timing collectives")
            return _collective_s(move, group, device)

        return line_of(seconds)

    return CollectiveTimes(
        all_reduce=line(PARTIAL, R_SUMMED),
        all_gather=line(rows, R_SUMMED),
        reduce_scatter=line(PARTIAL, rows),
        all_to_all=line(rows, columns),
        broadcast=line(None, R_SUMMED),
        reduce=line(PARTIAL, None),
        root=line(None, rows),
    )


def line_of(seconds: Callable[[int], float]) -> AlphaBeta:
    """The line through the times of a small message and of one that shows the bandwidth."""
    small_s, large_bytes = seconds(SMALL_BYTES), LARGE_BYTES
    # Times are those of the slowest rank: all ranks go on or stop here together.
    while (large_s := seconds(large_bytes)) < _SHOWS * small_s and large_bytes < MOST_BYTES:
        large_bytes *= 4
    beta = max(0.0, (large_s - small_s) / (large_bytes - SMALL_BYTES))
    return AlphaBeta(max(0.0, small_s - beta * SMALL_BYTES), beta)


def _collective_s(work: Callable[[], object], group: Collectives, device: torch.device) -> float:
    """The mean of some in a row, on the slowest rank, after one that brings all ranks together."""
    work()
    group.begin_all_reduce(torch.zeros(1, device=device), purpose="timing collectives")()
    synchronize(device)
    start_s = time.perf_counter()
    for _ in range(_REPEATS):
        work()
    synchronize(device)
    own_s = (time.perf_counter() - start_s) / _REPEATS
    return max(each for (each,) in _of_all([own_s], group, device))
