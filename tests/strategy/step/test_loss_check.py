"""What cutting a batch changes is noticed, however small: forwards and, with 1F1B, losses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from helpers import uneven_losses as losses
from helpers.jobs import lines_of_fit
from helpers.models import DataSpec
from helpers.reference import assert_equal_training, train_pipeline
from helpers.training import Training, train
from helpers.workers import WorkerPool

STRATEGY: dict[str, Any] = {"num_microbatches": 4, "schedule": "1f1b", "timeout": 100.0}
DATA = DataSpec(num_samples=64)
FLOATS = DataSpec(num_samples=64, dtype="float32")
MASKED = losses.MaskedData(num_samples=64)


@pytest.mark.parametrize(
    ("build", "data", "num_steps"),
    [
        (losses.BalancedTower, DATA, 0),
        (partial(losses.BalancedTower, 1e-3), FLOATS, 0),
        (partial(losses.BalancedTower, 1e-6), DATA, 0),
        (losses.MaskedTower, MASKED, 2),  # the third mini-batch is the first that is masked
        (losses.InnerLossTower, MASKED, 2),
        (losses.TouchedTower, FLOATS, 0),
    ],
    ids=["small term", "in float32", "smaller", "masked later", "in the forward", "touched"],
)
def test_a_loss_that_is_no_mean_is_an_error(
    pool: WorkerPool, build: Any, data: DataSpec, num_steps: int
) -> None:
    training = Training(build, data, num_steps=8, validate=False)
    for outcome in pool.outcomes(train, training, STRATEGY, 2, num_ranks=2):
        assert "is not the mean over its samples" in outcome.error
        assert "Use schedule='gpipe'" in outcome.error
    if num_steps:
        before = Training(build, data, num_steps=num_steps, validate=False)
        assert_equal_training(pool, before, num_ranks=2, **STRATEGY)


@pytest.mark.parametrize(
    ("build", "data"),
    [
        (losses.MaskedTower, losses.UnmaskedData(num_samples=61)),
        (losses.InnerLossTower, losses.UnmaskedData(num_samples=61)),
        (losses.ProjectingTower, DATA),
    ],
    ids=["mask of ones", "in the forward", "large terms"],
)
def test_a_mean_is_none(pool: WorkerPool, build: Any, data: DataSpec) -> None:
    training = Training(build, data, num_steps=9, validate=False)
    assert_equal_training(pool, training, num_ranks=2, **STRATEGY)


def test_an_output_that_nobody_uses_says_nothing(pool: WorkerPool) -> None:
    training = Training(losses.PerSampleTower, DATA, num_steps=3, validate=False)
    plan = [["first"], ["head"]]
    assert_equal_training(pool, training, num_ranks=2, plan=plan, **STRATEGY)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("how", ["halves", "loop", "large", "layer"])
def test_the_number_of_samples_moves_them(pool: WorkerPool, how: str, schedule: str) -> None:
    """Sixteen a micro-batch of the layer's: more than it minds, of which the trial has fewer."""
    size = 64 if how == "layer" else 16
    data = DataSpec(num_samples=2 * size, batch_size=size)
    training = Training(partial(losses.MovingTower, how), data, num_steps=3, validate=False)
    strategy = STRATEGY | {"schedule": schedule}
    if schedule == "gpipe" and how in ("halves", "layer"):
        assert_equal_training(pool, training, num_ranks=2, **strategy)
        return
    for outcome in pool.outcomes(train, training, strategy, 2, num_ranks=2):
        refusal = "is not the mean over its samples" if schedule == "1f1b" else "size of an input"
        assert refusal in outcome.error


@pytest.mark.parametrize(("build", "num_lines"), [(losses.TouchedTower, 1), (losses.Tower, 0)])
def test_samples_that_touch_each_other_below_rounding(
    pool: WorkerPool, build: Any, num_lines: int
) -> None:
    """By less than deep networks differ when a batch is cut: bits tell, not a tolerance."""
    training = Training(build, FLOATS, num_steps=2, validate=False)
    found = pool.run(lines_of_fit, training, {"num_microbatches": 4}, 2, num_ranks=2)
    assert len([line for line in found[0] if "in one piece" in line]) == num_lines


@pytest.mark.parametrize("build", [losses.NoisyTower, losses.ProjectingTower])
def test_neither_noise_nor_rounding_is_an_error(pool: WorkerPool, build: Any) -> None:
    training = Training(build, FLOATS, num_steps=9, validate=False)
    results = train_pipeline(pool, training, num_ranks=2, **STRATEGY)
    assert len(results[0].weights) == 4


@pytest.mark.parametrize(("build", "num_lines"), [(losses.NoisyTower, 1), (losses.Tower, 0)])
def test_numbers_drawn_in_the_step_are_said_once(
    pool: WorkerPool, build: Any, num_lines: int
) -> None:
    training = Training(build, FLOATS, num_steps=4, validate=False)
    found = pool.run(lines_of_fit, training, STRATEGY, 2, num_ranks=2)
    assert len([line for line in found[0] if "draws random numbers" in line]) == num_lines
