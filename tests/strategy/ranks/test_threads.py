"""Threads that runs begin: they end with them, and users' code has room in them."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.models import DataSpec, ExportableModel
from helpers.training import Training, train
from helpers.workers import WorkerPool, free_port

from lightning_gpp.runtime.suspend import StepThreads


def native_threads() -> Counter[str]:
    """Threads of this process that gloo and torch's store have begun, by name."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return Counter(name for name in names if "gloo" in name or "store" in name)


def train_and_count(schedule: str, ports: Sequence[int]) -> list[Counter[str]]:
    counts = []
    for port in ports:  # one each: a rank might meet the store of the run before
        os.environ["MASTER_PORT"] = str(port)
        train(
            Training(ExportableModel, DataSpec(num_inputs=2), num_steps=2, validate=False),
            {"timeout": 100, "planner": "balanced", "num_microbatches": 2, "schedule": schedule},
            2,
        )
        import torch.distributed as dist

        dist.destroy_process_group()
        counts.append(native_threads())
    return counts


@pytest.mark.skipif(sys.platform != "linux", reason="threads are named in /proc")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_runs_leave_no_native_threads(pool: WorkerPool, schedule: str) -> None:
    ports = [free_port() for _ in range(3)]
    for first, *_, last in pool.run(train_and_count, schedule, ports, num_ranks=2):
        assert not last - first


def recursive_step() -> int:
    sys.setrecursionlimit(20_000)
    threads, depths = StepThreads(), []

    def descend(depth: int) -> int:
        return depth if depth == 2500 else next(map(descend, [depth + 1]))

    threads.run(lambda: depths.append(descend(0)))
    threads.close()
    (depth,) = depths
    return depth


def test_steps_may_recurse_as_deeply_as_anywhere(pool: WorkerPool) -> None:
    assert pool.run(recursive_step, num_ranks=1) == [2500]
