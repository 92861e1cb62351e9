"""A forward that is called in several forms (None or a tensor, a flag) trains as on one device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers import forms_of_call as forms
from helpers.models import DataSpec
from helpers.reference import (
    assert_equal_training,
    assert_same_training,
    train_one_device,
    train_pipeline,
)
from helpers.training import Training, train
from helpers.workers import WorkerPool

from lightning_gpp import TimelineCallback

CHAIN = [["first"], ["second"], ["head"]]
LOSS_ALONE = [["first", "second", "head"], ["torch.square", "torch.mean"]]
REPLICAS = [
    {"modules": ["first"], "devices": [0, 1]},
    {"modules": ["second", "head"], "devices": [1]},
]
OF_RECURRENT = [
    {"modules": ["first"], "devices": [0]},
    {"modules": ["second"], "devices": [0, 1]},
    {"modules": ["head"], "devices": [1], "microbatch_multiple": 2},
]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("build", "plan", "num_ranks"),
    [
        (forms.LossInForward, CHAIN, 3),
        (forms.LossInForward, REPLICAS, 2),
        (forms.Flagged, [["first"], ["second", "head"]], 2),
        (forms.ByMode, [["first"], ["second", "head", "aside"]], 2),
    ],
)
@pytest.mark.parametrize("validates_first", [True, False])
def test_as_on_one_device(
    pool: WorkerPool, build: Any, plan: Any, num_ranks: int, schedule: str, validates_first: bool
) -> None:
    checks = {"num_sanity_val_steps": 2 if validates_first else 0}
    training = Training(build, num_steps=8, trainer=checks)
    if build is forms.Flagged and not validates_first:
        plan = [["first"], ["second", "head", "aside"]]
    assert_equal_training(
        pool, training, num_ranks=num_ranks, plan=plan, schedule=schedule, num_microbatches=4
    )


def test_a_state_that_is_none_at_first(pool: WorkerPool) -> None:
    training = Training(forms.Remembers, num_steps=8)
    assert_equal_training(pool, training, num_ranks=3, plan=CHAIN, num_microbatches=4)


@pytest.mark.parametrize(("plan", "num_microbatches"), [(None, 1), (OF_RECURRENT, 4)])
def test_the_state_of_a_recurrent_layer(pool: WorkerPool, plan: Any, num_microbatches: int) -> None:
    """Replicas cannot share what has samples in its second dimension: the first takes them all."""
    training = Training(forms.Recurs, DataSpec(num_samples=32), num_steps=4)
    how = {"plan": plan, "num_microbatches": num_microbatches}
    assert_equal_training(pool, training, num_ranks=2, **how)


@pytest.mark.parametrize("validates_first", [True, False])
def test_a_layer_with_statistics_that_one_form_uses(
    pool: WorkerPool, validates_first: bool
) -> None:
    checks = {"num_sanity_val_steps": 2 if validates_first else 0}
    training = Training(forms.Normalized, num_steps=6, trainer=checks)
    plan = [["first"], ["second", "head"] if validates_first else ["second", "head", "aside"]]
    assert_equal_training(pool, training, num_ranks=2, plan=plan, num_microbatches=1)


@pytest.mark.parametrize("validates_first", [True, False])
def test_statistics_that_one_mode_changes(pool: WorkerPool, validates_first: bool) -> None:
    """The plan is that of training, in either case."""
    checks = {"num_sanity_val_steps": 2 if validates_first else 0}
    training = Training(forms.NormalizedByMode, num_steps=6, trainer=checks)
    plan = [["first"], ["second"], ["head", "aside"]]
    assert_equal_training(pool, training, num_ranks=3, plan=plan, num_microbatches=1)


@pytest.mark.parametrize("validates_first", [True, False])
def test_both_forms_in_one_step_have_no_timeline(
    pool: WorkerPool, tmp_path: Path, validates_first: bool
) -> None:
    checks = {"num_sanity_val_steps": 2 if validates_first else 0}
    training = Training(forms.BothForms, num_steps=6, trainer=checks)
    expected = train_one_device(training)
    training = replace(training, callbacks=partial(recorded, str(tmp_path)))
    results = train_pipeline(pool, training, num_ranks=3, plan=CHAIN, num_microbatches=4)
    assert_same_training(results, expected, training.data.dtype)
    assert not list(tmp_path.rglob("timeline*"))


def recorded(folder: str) -> list[Any]:
    return [TimelineCallback([3], folder)]


@pytest.mark.parametrize(
    ("build", "strategy", "text"),
    [
        (forms.LossInForward, {"pipelines": 2}, "pipelines side by side run one form"),
        (forms.ByMode, {"pipelines": 2}, "move the branch on self.training into a sub-module"),
        (forms.LossInForward, {"schedule": "1f1b-async"}, "was None when the model was captured"),
        (forms.Remembers, {"schedule": "1f1b"}, "'gpipe', which captures every form of call"),
        (forms.Numbered, {}, "which is fixed in its graph, got 0.5"),
    ],
)
def test_what_is_refused(pool: WorkerPool, build: Any, strategy: Any, text: str) -> None:
    training = Training(build, DataSpec(num_samples=64), num_steps=4)
    num_ranks = 2 * strategy.get("pipelines", 1)
    for outcome in pool.outcomes(train, training, strategy, num_ranks, num_ranks=num_ranks):
        assert text in outcome.error
