"""Processes that reserve one channel at the same time never get it at the same time."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from helpers.workers import WorkerPool

from lightning_gpp.emulation.shared import SharedReservations

NUM_EACH = 3000
NUM_SUMS = 50
PAIR = (0, 1)


def reserve(path: Path) -> tuple[list[float], list[float]]:
    """Starts of this rank's messages on one channel, and the ends of sums over both ranks."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = SharedReservations(path)
    dist.barrier()
    starts = [own.reserve(["bus"], 0.0, 1.0) for _ in range(NUM_EACH)]
    for number in range(NUM_SUMS):
        own.meet((PAIR, number), float(number + rank), ["out"], 0.5)
    dist.barrier()
    ends = [own.end_s((PAIR, number)) for number in range(NUM_SUMS)]
    own.close()
    return starts, ends


def test_two_processes(pool: WorkerPool, tmp_path: Path):
    (first, ends), (second, same_ends) = pool.run(reserve, tmp_path / "channels", num_ranks=2)
    assert sorted(first + second) == [float(start) for start in range(2 * NUM_EACH)]
    assert ends == same_ends == [number + 1.5 for number in range(NUM_SUMS)]
