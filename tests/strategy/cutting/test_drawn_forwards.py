"""Drawn forwards with users' habits are equal to one device, cut or not, or refused with a reason.

What they do with their samples may not show in the first batch: batches differ in kind.
"""

from __future__ import annotations

import pytest
from helpers.drawn_cases import BatchKind, DrawnCase, Outcome, drawn_cases, run_case
from helpers.random_models import DecoratedModel, HabitualModel, ModelSpec, Node
from helpers.workers import WorkerPool
from hypothesis import Phase, event, given, settings

pytestmark = pytest.mark.timeout(3600)

NUM_CASES = 30 if settings.default.max_examples <= 20 else 2000
"""The latter with HYPOTHESIS_PROFILE=thorough, which takes about a quarter of an hour."""

FULL, MIXED = BatchKind("full"), BatchKind("mixed")


# Shrinking would train for minutes; the models are small enough to read as they are.
@settings(max_examples=NUM_CASES, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(case=drawn_cases())
def test_as_one_device_or_refused(pool: WorkerPool, case: DrawnCase) -> None:
    outcome = outcome_of(pool, case)
    event(outcome.what)
    assert outcome.is_right, outcome.shown


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    "habit",
    [
        *("read_by_numpy", "sorted_by_length", "running_length", "shorter_ones", "all_pairs"),
        *("share_of_longest", "different_lengths", "repeated", "trimmed", "RunningMean", "Forces"),
        *("normed_gradient", "HookedGradient", "RemembersMean"),
    ],
)
def test_the_first_batch_does_not_show_it(pool: WorkerPool, habit: str, schedule: str) -> None:
    spec = ModelSpec(1, (Node("linear", (0,)), Node(habit, (1,))))
    case = DrawnCase(spec, HabitualModel, (FULL, FULL, MIXED), (FULL,), schedule)
    outcome = outcome_of(pool, case)
    assert outcome.is_right, outcome.shown
    found_late = ("sorted_by_length", "running_length", "shorter_ones")
    if habit in (*found_late, "normed_gradient", "HookedGradient"):
        assert outcome.what == ("in one piece" if schedule == "gpipe" else "refused")


def test_a_stage_that_takes_all_samples_excuses_no_other(pool: WorkerPool) -> None:
    """One of the drawn plan's stages takes whole batches, but not the one where samples meet."""
    nodes = (Node("tanh", (0,)), Node("running_length", (1,)), Node("sorted_and_back", (2,)))
    spec = ModelSpec(1, nodes, result="tuple", loss="classification", seed=42)
    kinds = (BatchKind("full", states=True), BatchKind("alike", states=True))
    outcome = outcome_of(pool, DrawnCase(spec, DecoratedModel, kinds, kinds[:1], plan_seed=221))
    assert outcome.what == "in one piece", outcome.shown


def outcome_of(pool: WorkerPool, case: DrawnCase) -> Outcome:
    """What became of a case in a process of its own."""
    (outcome,) = pool.run(run_case, case, num_ranks=1)
    return outcome
