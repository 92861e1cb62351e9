"""What every kind of sums must do, as functions that each rank of a pair runs."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gpp.runtime.sums import Sums
from lightning_gpp.runtime.waits import TransportError

RANKS = (0, 1)
LIMIT_S = 100.0


def several_sums_go_on_at_once(sums: Sums, rank: int) -> None:
    tensors = [torch.full((size,), float(rank + size)) for size in (3, 1 << 18, 5)]
    pending = [sums.start(tensor, RANKS) for tensor in tensors]
    for tensor, each in zip(reversed(tensors), reversed(pending), strict=True):
        each(LIMIT_S, "contract")
        assert torch.equal(tensor, torch.full_like(tensor, 2.0 * len(tensor) + 1))


def types_of_gradients_are_kept(sums: Sums, rank: int) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        tensor = torch.full((4,), rank + 0.5, dtype=dtype)
        sums.start(tensor, RANKS)(LIMIT_S, "contract")
        assert tensor.dtype is dtype
        assert torch.equal(tensor, torch.full((4,), 2.0, dtype=dtype))


def a_wait_ends_after_its_time(sums: Sums, rank: int) -> None:
    flag = Path(tempfile.gettempdir(), f"late-{os.environ.get('MASTER_PORT', os.getpid())}")
    tensor = torch.ones(2)
    if rank == 0:
        pending = sums.start(tensor, RANKS)
        with pytest.raises(TransportError, match=r"stage 1: the gradients of ranks 0, 1 .* 0.2 s"):
            pending(0.2, "stage 1")
        flag.touch()
    else:
        while not flag.exists():
            time.sleep(0.01)
        flag.unlink()
        pending = sums.start(tensor, RANKS)
    pending(LIMIT_S, "contract")
    assert tensor.tolist() == [2.0, 2.0]


CHECKS = (several_sums_go_on_at_once, types_of_gradients_are_kept, a_wait_ends_after_its_time)


def equal_bits(sums: Sums, rank: int) -> Tensor:
    """Numbers whose sum depends on the order; all ranks must return the same bits."""
    generator = torch.Generator().manual_seed(rank)
    tensor = torch.randn(100_003, generator=generator) * 10.0 ** (rank * 3)
    ranks = (0, 1, 2)
    sums.start(tensor, ranks)(LIMIT_S, "contract")
    return tensor


def abort_wakes_the_waiting(sums: Any, rank: int) -> None:
    """The last check: this rank's sums are of no use afterwards."""
    if rank == 0:
        error = RuntimeError("rank 1 failed first")
        threading.Timer(0.2, sums.waits.abort, args=(error,)).start()
        with pytest.raises(RuntimeError, match="rank 1 failed first"):
            sums.start(torch.ones(1), RANKS)(LIMIT_S, "contract")
