"""What every kind of collectives must do, as functions that each of three ranks runs."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gpp.runtime.waits import TransportError
from lightning_gpp.spmd.run.moves import Collectives

NUM_RANKS = 3
SHAPES = [(2, 5), (0, 5), (7, 1)]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.complex64)


def tensor(rank: int, shape: tuple[int, ...], dtype: torch.dtype, part: int = 0) -> Tensor:
    """What a rank has; every rank can make it."""
    generator = torch.Generator().manual_seed(100 * rank + part)
    return (torch.rand(shape, generator=generator) * 1000 - 500).to(dtype)


def everything_arrives(group: Collectives, rank: int) -> None:
    """All collectives, of unequal and empty shards that need not be contiguous."""
    for dtype in DTYPES:
        shards = [tensor(r, shape, dtype) for r, shape in enumerate(SHAPES)]
        own = shards[rank].t().contiguous().t()
        every_second = torch.stack([shards[rank], shards[0].new_full(SHAPES[rank], 7)], -1)[..., 0]
        _shards_arrive(group, rank, own, shards)
        _shards_arrive(group, rank, every_second, shards)
        whole = group.broadcast(own if rank == 0 else None, SHAPES[0], dtype, purpose="broadcast")
        assert torch.equal(whole, shards[0])


def _shards_arrive(group: Collectives, rank: int, own: Tensor, shards: list[Tensor]) -> None:
    gathered = group.all_gather(own, SHAPES, purpose="gather")
    for one, other in zip(gathered, shards, strict=True):
        assert torch.equal(one, other)
    parts = [tensor(rank, (to + 1, 2), own.dtype, to) for to in range(NUM_RANKS)]
    shapes = [(rank + 1, 2)] * NUM_RANKS
    exchanged = group.all_to_all(parts, shapes, purpose="exchange")
    expected = [tensor(source, (rank + 1, 2), own.dtype, rank) for source in range(NUM_RANKS)]
    for one, other in zip(exchanged, expected, strict=True):
        assert torch.equal(one, other)


def sums_have_the_same_bits(group: Collectives, rank: int) -> Tensor:
    """Numbers whose sum depends on the order."""
    scale = 10.0 ** (3 * rank)
    given = tensor(rank, (1003,), torch.float64) * scale
    return group.begin_all_reduce(given, purpose="sum")()


def arguments_stay(group: Collectives, rank: int) -> None:
    """Results share no memory with what was given."""
    given = torch.full((3,), float(rank))
    for made in (
        group.broadcast(given if rank == 0 else None, (3,), torch.float32, purpose="broadcast"),
        group.all_gather(given, [(3,)] * 3, purpose="gather")[rank],
    ):
        made += 1
    assert given.tolist() == [float(rank)] * 3


CHECKS = (everything_arrives, arguments_stay)


def a_wait_ends_after_its_time(group: Collectives, rank: int) -> None:
    """Collectives with a limit of 1 s, in which rank 2 does not take part."""
    if rank == 2:
        time.sleep(1.5)
        return
    with pytest.raises(TransportError, match=r"weights of layer 3: the collective"):
        group.begin_all_reduce(torch.ones(2), purpose="weights of layer 3")()


def abort_wakes_the_waiting(group: Any, rank: int) -> None:
    if rank == 0:
        time.sleep(0.5)
        group.waits.abort(RuntimeError("another rank failed"))
        return
    if rank == 1:
        error = RuntimeError("another rank failed")
        threading.Timer(0.5, group.waits.abort, [error]).start()
    else:
        threading.Timer(0.5, group.waits.abort, [RuntimeError("another rank failed")]).start()
    with pytest.raises(RuntimeError, match="another rank failed"):
        group.begin_all_reduce(torch.ones(2), purpose="sum")()
