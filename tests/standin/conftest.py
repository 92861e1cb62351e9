"""Fixtures for tests on the stand-in's GPUs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from helpers.workers import WorkerPool

from standin.build import obstacle
from standin.switch import ON_PATH, environment

sys.path.insert(0, str(ON_PATH))  # for what ranks import of standin_gpus; workers inherit the path


@pytest.fixture(scope="session")
def gpus() -> Iterator[WorkerPool]:
    """Worker processes that play ranks, each of which sees four GPUs.

    ``helpers.training.train`` and ``make_trainer`` put rank ``r`` on ``cuda:r`` there. Operators
    take a random time, as they do on a GPU.
    """
    if reason := obstacle():
        pytest.skip(reason)
    workers = WorkerPool(environment("gpus", delay_us=300))
    yield workers
    workers.close()
