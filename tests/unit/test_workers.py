"""The worker pool reports every way in which a rank can end, and recovers from it."""

from __future__ import annotations

import pytest
from helpers import rank_functions
from helpers.workers import WorkerError, WorkerPool


def test_an_error_is_raised_with_traceback_cause_and_output(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(rank_functions.raise_on, 1, num_ranks=2)
    for text in ("ranks 1 of 2", "in raise_on", "out of order", "the cause", "about to raise"):
        assert text in str(caught.value)
    first, second = pool.outcomes(rank_functions.raise_on, 1, num_ranks=2)
    assert (first.value, first.failed) == ("fine", False)
    assert (second.error_type, second.exit_code, second.hung) == ("ValueError", None, False)


def test_a_rank_that_hangs_is_named_with_its_stack_and_replaced(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="ranks 1 hung for 5 s") as caught:
        pool.run(rank_functions.hang_on, 1, num_ranks=2, limit_s=5.0)
    assert "in hang_on" in str(caught.value)
    assert pool.run(rank_functions.raise_on, 5, num_ranks=2) == ["fine", "fine"]


def test_a_thread_left_behind_fails_the_call(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="forgotten"):
        pool.run(rank_functions.leave_a_thread, num_ranks=1)
