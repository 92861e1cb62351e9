"""Bad input and failing ranks end in one clear error on all ranks, within seconds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.faults import FAULTS, read_after_a_fault, run_fault, train_on_after_a_fault
from helpers.models import DataSpec, ExportableModel
from helpers.training import Training, train
from helpers.workers import WorkerPool

NUM_RANKS = 3
LIMIT_S = 120.0
"""Below the strategy's own limit of 300 s: a rank that only waits is killed, and counts as hung."""


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(
            *(name, schedule), marks=pytest.mark.extra if (n + i) % len(fault.schedules) else ()
        )
        for n, (name, fault) in enumerate(FAULTS.items())
        for i, schedule in enumerate(fault.schedules)
    ],
)
def test_all_ranks_end_with_the_error(pool: WorkerPool, name: str, schedule: str) -> None:
    fault = FAULTS[name]
    outcomes = pool.outcomes(
        run_fault, name, schedule, NUM_RANKS, num_ranks=NUM_RANKS, limit_s=LIMIT_S
    )
    report = "\n".join(outcome.describe() for outcome in outcomes)
    for outcome in outcomes:
        assert not outcome.hung, report
        if outcome.rank == fault.killed_rank:
            assert outcome.exit_code not in (None, 0), report
            continue
        assert outcome.error_type is not None, f"rank {outcome.rank} did not fail\n{report}"
        assert re.search(fault.pattern, outcome.error), (
            f"rank {outcome.rank}: {outcome.error!r} lacks {fault.pattern!r}\n{report}"
        )
        # A listener waits in gloo until its peer's process ends; it is a daemon thread.
        leaked = [name for name in outcome.leaked if not name.startswith("listen-")]
        assert not leaked, f"rank {outcome.rank} leaves threads: {leaked}"


def test_processes_that_saw_an_error_can_train_again(pool: WorkerPool) -> None:
    outcomes = pool.outcomes(run_fault, "training_step", "gpipe", NUM_RANKS, num_ranks=NUM_RANKS)
    assert all(outcome.failed for outcome in outcomes)
    strategy = {"num_microbatches": 4, "timeout": 100.0}
    training = Training(ExportableModel, DataSpec(num_inputs=2), num_steps=4)
    pool.run(train, training, strategy, NUM_RANKS, num_ranks=NUM_RANKS)


def test_after_a_fault_of_one_rank_the_module_is_saved_and_trains_on(
    pool: WorkerPool, tmp_path: Path
) -> None:
    pool.run(train_on_after_a_fault, str(tmp_path), NUM_RANKS, num_ranks=NUM_RANKS)


def test_what_reads_a_module_whose_weights_are_lost_says_so(
    pool: WorkerPool, tmp_path: Path
) -> None:
    outcomes = pool.outcomes(
        read_after_a_fault, str(tmp_path), NUM_RANKS, num_ranks=NUM_RANKS, limit_s=LIMIT_S
    )
    report = "\n".join(outcome.describe() for outcome in outcomes)
    for outcome in (outcomes[0], outcomes[2]):
        assert not outcome.failed, report
        *first, state, saving, forward, fit = outcome.value
        assert "no checkpoint can be written after this error: rank 1" in "".join(first)
        for text in (state, saving, forward, fit):
            assert re.search(r"has lost values of parameters or buffers, such as '\w", text), report
            assert "load_from_checkpoint" in text
    assert not list(tmp_path.iterdir())
