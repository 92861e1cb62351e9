"""Devices and collectives timed on the machine at hand, when a run begins.

An accelerator is given as much as fills it, many times in a row, and is waited for once: a wait
after each would time launches, and what fits into its cache would not time its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gpp.common.torch_device import is_accelerator, synchronize
from lightning_gpp.spmd.costs.machine import (
    AlphaBeta,
    CollectiveTimes,
    DeviceSpeeds,
    measured_speeds,
)
from lightning_gpp.spmd.run.collectives import Collectives, Shape
from lightning_gpp.strategy.spmd.sharded import ELEMENTWISE

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


@dataclass(frozen=True, slots=True)
class TimedWork:
    """A kind of work.

    Attributes:
        do: does it once.
        amount: how much that is: operations, bytes, launches.
    """

    do: Callable[[], object]
    amount: float


def typical_update(optimizers: Sequence[Optimizer], device: torch.device) -> TimedWork | None:
    """A step that takes as long per byte trained as those of some optimizers, as far as one can.

    Half of the bytes that they train are in parameters of this size or larger (small ones stay in
    a core's cache), and it is the optimizer of that parameter. On an accelerator it takes as many
    of them together as fill it, but no more than there are. None where nothing is trained, and
    for optimizers that are not of :mod:`torch.optim`, whose arguments nobody knows.
    """
    trained = [
        (parameter, group, type(optimizer))
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    trained.sort(key=lambda each: each[0].nbytes)
    before = np.cumsum([parameter.nbytes for parameter, _, _ in trained])
    if not trained or not before[-1]:
        return None
    like, group, kind = trained[int(np.searchsorted(before, before[-1] / 2))]
    if kind not in ELEMENTWISE or kind is torch.optim.SparseAdam:
        return None
    most_bytes = _ACCELERATOR_COPIED_BYTES // 2 if is_accelerator(device) else _COPIED_BYTES
    count = min(like.numel(), most_bytes // like.element_size())
    copies = most_bytes // (count * like.element_size()) if is_accelerator(device) else 1
    parameters = [
        torch.nn.Parameter(torch.ones(count, dtype=like.dtype, device=device))
        for _ in range(min(copies, len(trained)))
    ]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = kind(parameters)
    options = {name: value for name, value in group.items() if name != "params"}
    optimizer.param_groups[0].update(options)
    return TimedWork(optimizer.step, sum(parameter.nbytes for parameter in parameters))


def measure_speeds(
    device: torch.device, group: Collectives | None = None, update: TimedWork | None = None
) -> DeviceSpeeds:
    """All ranks: how fast each device is while all of them compute; all ranks get the same.

    What a device is busy with beside this may come and go. So all are timed in short rounds that
    they begin together, of which the median counts.

    Args:
        device: of this rank.
        group: the ranks; this device alone if not given.
        update: of the optimizer, by bytes, on all of them; not timed if not given.
    """
    is_large = is_accelerator(device)
    side = _ACCELERATOR_SIDE if is_large else _SIDE
    row = torch.arange(1, side + 1, device=device) * _GOLDEN % 1
    square = row.outer(row)  # numbers that are all alike take less power: clocks would be high
    long_bytes = _ACCELERATOR_COPIED_BYTES if is_large else _COPIED_BYTES
    long, short = torch.ones(long_bytes // 4, device=device), torch.ones(1, device=device)
    # Results are written into memory that there is: new pages take longer than what is written.
    product, added = torch.empty_like(square), torch.empty_like(long)
    works = [
        TimedWork(lambda: torch.mm(square, square, out=product), 2 * side**3),
        TimedWork(lambda: torch.add(long, 1, out=added), 2 * long_bytes),  # reads as many
        *([update] if update else []),
        TimedWork(lambda: torch.add(short, 1), 1),
    ]
    counts = [_count(work, device) for work in works]

    def measured() -> list[float]:
        timed = zip(works, counts, strict=True)
        return [_seconds(work, device, count) / (count * work.amount) for work, count in timed]

    rounds = [_of_all(measured(), group, device) for _ in range(ROUNDS)]
    flop_s, byte_s, *update_s, launch_s = np.median(rounds, axis=0).T
    return measured_speeds(1 / flop_s, 1 / byte_s, launch_s, update_s[0] if update else 0.0)


def _of_all(own: list[float], group: Collectives | None, device: torch.device) -> list[list[float]]:
    """Times of all ranks; they begin the next round together."""
    if group is None:
        return [own]
    shapes = [(len(own),)] * group.num_ranks
    tensor = torch.tensor(own, dtype=torch.float32, device=device)
    every = group.all_gather(tensor, shapes, purpose="timing the devices")
    return [each.tolist() for each in every]


def _count(work: TimedWork, device: torch.device) -> int:
    """How often the work fills its part of a round."""
    count = 1
    while _seconds(work, device, count) < _STRETCH_S / 2:
        count *= 2
    return count


def _seconds(work: TimedWork, device: torch.device, count: int) -> float:
    """What so much work takes; an accelerator, by its own clock, is waited for once."""
    if not is_accelerator(device):
        start_s = time.perf_counter()
        for _ in range(count):
            work.do()
        return time.perf_counter() - start_s
    stream = torch.accelerator.current_stream(device)
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    start.record(stream)
    for _ in range(count):
        work.do()
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
    """All ranks: lines through the times of a small and a large message, a line per collective.

    The large one is as large as it takes for the bandwidth to show. All ranks get the same: a
    collective takes as long as on the slowest rank.
    """
    count = group.num_ranks

    def cut(tensor: Tensor, count: int) -> tuple[list[Tensor], list[Shape]]:
        parts = list(tensor[: tensor.numel() // count * count].chunk(count))
        return parts[: group.num_ranks], [tuple(parts[0].shape)] * group.num_ranks

    def all_gather(tensor: Tensor, purpose: str) -> object:
        parts, shapes = cut(tensor, count)
        return group.all_gather(parts[0], shapes, purpose=purpose)

    works: dict[str, Callable[..., object]] = {
        "all_reduce": group.all_reduce,
        "all_gather": all_gather,
        "reduce_scatter": lambda tensor, purpose: group.reduce_scatter(
            cut(tensor, count)[0], purpose=purpose
        ),
        "all_to_all": lambda tensor, purpose: group.all_to_all(
            *cut(tensor, count**2), purpose=purpose
        ),
        "broadcast": lambda tensor, purpose: group.broadcast(
            tensor, tuple(tensor.shape), tensor.dtype, purpose=purpose
        ),
        "reduce": group.reduce,
        "root": lambda tensor, purpose: group.scatter(
            *cut(tensor, count), tensor.dtype, purpose=purpose
        ),
    }
    lines = {
        name: line_of(
            partial(_collective_s, partial(work, purpose=f"timing {name}"), group, device)
        )
        for name, work in works.items()
    }
    return CollectiveTimes(**lines)


def line_of(seconds: Callable[[int], float]) -> AlphaBeta:
    """The line through the times of a small message and of one that shows the bandwidth."""
    small_s, large_bytes = seconds(SMALL_BYTES), LARGE_BYTES
    # Times are those of the slowest rank: all ranks go on or stop here together.
    while (large_s := seconds(large_bytes)) < _SHOWS * small_s and large_bytes < MOST_BYTES:
        large_bytes *= 4
    beta = max(0.0, (large_s - small_s) / (large_bytes - SMALL_BYTES))
    return AlphaBeta(max(0.0, small_s - beta * SMALL_BYTES), beta)


def _collective_s(
    work: Callable[[Tensor], object], group: Collectives, device: torch.device, size_bytes: int
) -> float:
    """The mean of some in a row, on the slowest rank, after one that brings all ranks together."""
    tensor = torch.zeros(size_bytes // 4, device=device)
    work(tensor)
    group.all_reduce(torch.zeros(1, device=device), purpose="timing collectives")
    synchronize(device)
    start_s = time.perf_counter()
    for _ in range(_REPEATS):
        work(tensor)
    synchronize(device)
    own_s = (time.perf_counter() - start_s) / _REPEATS
    return max(each for (each,) in _of_all([own_s], group, device))
