"""Collectives timed on the machine at hand, when a run begins."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_gpp.common.torch_device import synchronize
from lightning_gpp.spmd.costs.collective_times import AlphaBeta, CollectiveTimes
from lightning_gpp.spmd.run.collectives import Collectives

SMALL_BYTES, LARGE_BYTES, MOST_BYTES = 1 << 12, 1 << 22, 1 << 26
"""Hardly more than latency; enough for the bandwidth to show of a wire (30 ms by 1 Gbit/s); and of
links between GPUs (0.2 ms by 300 GB/s)."""

_SHOWS = 8
"""The bandwidth shows where a large message takes this many times as long as a small one."""

_REPEATS = 5
_FLOAT_BYTES = 4


def measure_collectives(group: Collectives, device: torch.device) -> CollectiveTimes:
    """All ranks: lines through the times of a small and a large message, a line per collective.

    The large one is as large as it takes for the bandwidth to show.

    All ranks get the same: a collective takes as long as on the slowest rank.
    """
    ranks = range(group.num_ranks)

    def cut(tensor: Tensor, count: int) -> list[Tensor]:
        return list(tensor[: tensor.numel() // count * count].chunk(count))

    def all_gather(tensor: Tensor) -> object:
        (part, *_) = cut(tensor, len(ranks))
        shapes = [tuple(part.shape)] * len(ranks)
        return group.all_gather(part, shapes, is_grouped=False, purpose="timing an all-gather")

    def reduce_scatter(tensor: Tensor) -> object:
        parts = cut(tensor, len(ranks))
        return group.reduce_scatter(parts, is_grouped=False, purpose="timing a reduce-scatter")

    def all_to_all(tensor: Tensor) -> object:
        parts = cut(tensor, len(ranks) ** 2)[: len(ranks)]
        shapes = [tuple(part.shape) for part in parts]
        return group.all_to_all(parts, shapes, is_grouped=False, purpose="timing an all-to-all")

    def broadcast(tensor: Tensor) -> object:
        shape = tuple(tensor.shape)
        return group.broadcast(tensor, shape, tensor.dtype, purpose="timing a broadcast")

    def root(tensor: Tensor) -> object:
        parts = cut(tensor, len(ranks))
        shapes = [tuple(part.shape) for part in parts]
        return group.scatter(parts, shapes, tensor.dtype, purpose="timing a scatter")

    def line(work: Callable[[Tensor], object]) -> AlphaBeta:
        return _line(lambda size: _seconds(work, size, group, device))

    return CollectiveTimes(
        all_reduce=line(lambda tensor: group.all_reduce(tensor, purpose="timing an all-reduce")),
        all_gather=line(all_gather),
        reduce_scatter=line(reduce_scatter),
        all_to_all=line(all_to_all),
        broadcast=line(broadcast),
        reduce=line(lambda tensor: group.reduce(tensor, purpose="timing a reduction")),
        root=line(root),
    )


def _line(seconds: Callable[[int], float]) -> AlphaBeta:
    small_s, large_bytes = seconds(SMALL_BYTES), LARGE_BYTES
    # Times are those of the slowest rank: all ranks go on or stop here together.
    while (large_s := seconds(large_bytes)) < _SHOWS * small_s and large_bytes < MOST_BYTES:
        large_bytes *= 4
    beta = max(0.0, (large_s - small_s) / (large_bytes - SMALL_BYTES))
    return AlphaBeta(max(0.0, small_s - beta * SMALL_BYTES), beta)


def _seconds(
    work: Callable[[Tensor], object], size_bytes: int, group: Collectives, device: torch.device
) -> float:
    """The mean of some in a row, on the slowest rank, after one that brings all ranks together."""
    tensor = torch.zeros(size_bytes // _FLOAT_BYTES, device=device)
    work(tensor)
    group.all_reduce(torch.zeros(1, device=device), purpose="timing collectives")
    synchronize(device)
    start_s = time.perf_counter()
    for _ in range(_REPEATS):
        work(tensor)
    synchronize(device)
    own_s = torch.full((1,), (time.perf_counter() - start_s) / _REPEATS, device=device)
    shapes = [(1,)] * group.num_ranks
    every = group.all_gather(own_s, shapes, is_grouped=False, purpose="timing collectives")
    return float(torch.cat(every).max())
