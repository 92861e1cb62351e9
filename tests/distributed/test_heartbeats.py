"""Ranks hear of each other."""

from __future__ import annotations

import signal

from helpers import heartbeat_ranks
from helpers.workers import WorkerPool


def test_messages_go_both_ways_and_leaving_is_no_loss(pool: WorkerPool) -> None:
    results = pool.run(heartbeat_ranks.exchange, num_ranks=3)
    assert results == [
        ([(1, "from 1: "), (2, "from 2: ")], []),
        ([(0, "from 0: ")], []),
        ([(0, "from 0: ")], []),
    ]


def test_a_stopped_rank_is_noticed_and_killed(pool: WorkerPool) -> None:
    first, second = pool.outcomes(heartbeat_ranks.stopped, num_ranks=2)
    assert first.value is not None, first.describe()
    assert first.value[0] == 1 and "stopped or frozen" in first.value[1]
    assert second.exit_code == -signal.SIGKILL


def test_a_busy_rank_is_not_lost(pool: WorkerPool) -> None:
    assert pool.run(heartbeat_ranks.busy, num_ranks=2) == [[], []]
