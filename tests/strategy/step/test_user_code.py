"""User code beside the forward: what it changes, logs and returns is as on one device.

Or it is refused, on all ranks and at once.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import user_modules as users
from helpers.forms_of_call import LogsOtherRanksWeights
from helpers.jobs import lines_of_fit
from helpers.models import DataSpec
from helpers.reference import (
    assert_equal_training,
    train_one_device,
    train_pipeline,
    weight_differences,
)
from helpers.training import Training, train
from helpers.workers import WorkerPool

DATA = DataSpec(num_samples=21, num_inputs=2)
"""Three batches per epoch, the last smaller."""

STRATEGY: dict[str, Any] = {"num_microbatches": 4, "plan": users.PLAN, "timeout": 300.0}


def equal(pool: WorkerPool, build: Any, num_steps: int = 8, **training: Any) -> list[Any]:
    return assert_equal_training(
        pool, Training(build, DATA, num_steps=num_steps, **training), num_ranks=3, **STRATEGY
    )


def errors(pool: WorkerPool, build: Any, **strategy: Any) -> list[str]:
    """The error of each rank, none of which waits for the strategy's limit."""
    training = Training(build, DATA, num_steps=4, validate=False)
    arguments = STRATEGY | strategy
    outcomes = pool.outcomes(train, training, arguments, 3, num_ranks=3)
    report = "\n".join(outcome.describe() for outcome in outcomes)
    for outcome in outcomes:
        assert not outcome.hung, report
        assert outcome.error_type is not None, f"rank {outcome.rank} did not fail"
    return [outcome.error for outcome in outcomes]


def warnings_of(training: Training, strategy: dict[str, Any], num_ranks: int) -> list[str]:
    """The warnings of a rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(training, strategy, num_ranks)
    return [str(warning.message) for warning in caught]


# What rank 0 changes -----------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("where", "validate"),
    [
        ("on_train_batch_start", True),
        ("on_train_epoch_end", False),
        ("training_step", True),
        ("training_step after forward", False),
        ("training_step later", True),
    ],
)
def test_a_learning_rate_set_by_hand(pool: WorkerPool, where: str, validate: bool) -> None:
    results = equal(pool, partial(users.HandMadeRateModel, where), validate=validate)
    assert len({rates[0] for rates in results[2].learning_rates}) > 2


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_learning_rates_set_in_several_places(pool: WorkerPool, schedule: str) -> None:
    places = ("on_train_batch_start", "training_step later", "on_train_epoch_end")
    training = Training(partial(users.HandMadeRateModel, *places), DATA, num_steps=8)
    assert_equal_training(pool, training, num_ranks=3, schedule=schedule, **STRATEGY)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "frozen",
    [
        ((), ("left",), ("right", "head"), ()),
        (("left",), ("right",)),
        (("left", "right"), ()),
        ((), ("left", "right")),
        (("fuse", "norm", "head"), ()),
    ],
    ids=str,
)
def test_freezing_between_epochs(pool: WorkerPool, frozen: tuple[tuple[str, ...], ...]) -> None:
    equal(pool, partial(users.FreezingModel, *frozen), num_steps=12)


@pytest.mark.parametrize("how", ["method", "attribute", "hook"])
def test_freezing_within_steps(pool: WorkerPool, how: str) -> None:
    equal(pool, partial(users.FreezingInStepsModel, how))


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(
    ("name", "through_data"),
    [
        ("head.weight", False),
        ("left.0.weight", False),
        ("head.weight", True),
        ("left.0.weight", True),
        ("left.shift", False),
    ],
)
def test_changing_weights_on_rank_0_is_refused(
    pool: WorkerPool, name: str, through_data: bool
) -> None:
    for text in errors(pool, partial(users.ClampingModel, name, through_data)):
        assert "on_train_batch_end changed the" in text and f"'{name}'" in text


@pytest.mark.parametrize("name", ["left.0.weight", "left.shift"])
def test_replacing_weights_on_rank_0_is_refused(pool: WorkerPool, name: str) -> None:
    for text in errors(pool, partial(users.ReplacingModel, name)):
        assert f"training_step changed the parameter or buffer '{name}'" in text


@pytest.mark.parametrize(
    ("has_closure", "expected"), [(True, "go backward first"), (False, "was stepped directly")]
)
def test_optimizing_by_hand_as_others_cannot_is_refused(
    pool: WorkerPool, has_closure: bool, expected: str
) -> None:
    for text in errors(pool, partial(users.ByHandModel, has_closure)):
        assert expected in text


def test_a_buffer_that_only_rank_0_holds_may_change(pool: WorkerPool) -> None:
    results = equal(pool, partial(users.ClampingModel, "offset"))
    assert float(results[0].weights["offset"].max()) == pytest.approx(0.1)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("is_foreach", [False, True])
def test_an_average_of_what_other_ranks_hold_is_refused(pool: WorkerPool, is_foreach: bool) -> None:
    """torch itself adds nothing and says nothing."""
    for text in errors(pool, partial(users.TeacherModel, is_foreach)):
        assert "For averages use WeightAveraging" in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["on_train_batch_start", "on_train_batch_end"])
def test_saving_a_checkpoint_on_rank_0_is_refused(pool: WorkerPool, where: str) -> None:
    for text in errors(pool, partial(users.SavingModel, where)):
        assert f"{where} runs on rank 0 only, so it cannot save checkpoints" in text


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(
    ("where", "collective", "schedule"),
    [
        ("training_step", "barrier", "gpipe"),
        ("training_step", "barrier", "1f1b"),
        ("on_train_batch_end", "broadcast", "gpipe"),
        ("on_before_batch_transfer", "broadcast", "gpipe"),
        ("on_after_batch_transfer", "barrier", "gpipe"),
    ],
)
def test_a_collective_without_an_answer_on_rank_0_is_refused(
    pool: WorkerPool, where: str, collective: str, schedule: str
) -> None:
    build = partial(users.WaitingModel, where, collective)
    for text in errors(pool, build, schedule=schedule):
        assert re.search(r"\w+ (of a batch )?runs on rank 0 only", text), text


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("gpipe", "does not require grad"), ("1f1b", "requires no gradient")],
)
def test_a_loss_without_gradient_is_refused(pool: WorkerPool, schedule: str, expected: str) -> None:
    for text in errors(pool, users.DetachedLossModel, schedule=schedule):
        assert expected in text


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "1f1b-async"])
@pytest.mark.parametrize(
    ("name", "first", "was"),
    [("scale", 3, "1.0"), ("bonus", 3, "absent"), ("bonus", 0, "absent")],
)
def test_what_forward_reads_is_not_set_by_a_step(
    pool: WorkerPool, schedule: str, name: str, first: int, was: str
) -> None:
    """In the last step as well; one that is set in the first and stays is there at capture."""
    build, num = partial(users.AttributeModel, name, first), 1 if "async" in schedule else 4
    if first == 0 and schedule == "gpipe":
        equal(pool, build, num_steps=4, validate=False)
        return
    for text in errors(pool, build, schedule=schedule, num_microbatches=num):
        assert f"self.{name}, which was {was} when the model was captured and is 2.0 now" in text


@pytest.mark.parametrize("what", ["p", "training"])
@pytest.mark.parametrize("after", [False, True])
def test_a_step_changes_a_layer_of_another_rank(pool: WorkerPool, what: str, after: bool) -> None:
    """Under ``1f1b`` the others are in the midst of the mini-batch."""
    build = partial(users.DropModel, what, after)
    equal(pool, build, num_steps=5, validate=False)
    for text in errors(pool, build, schedule="1f1b"):
        assert "training_step changes an attribute of left.2, which other ranks" in text


@pytest.mark.parametrize(("schedule", "num"), [("1f1b", 1), ("gpipe", 0)])
def test_what_a_step_changes_per_micro_batch_is_told(
    pool: WorkerPool, schedule: str, num: int
) -> None:
    training = Training(users.CountingModel, DATA, num_steps=3, validate=False)
    found, _, _ = pool.run(warnings_of, training, STRATEGY | {"schedule": schedule}, 3, num_ranks=3)
    told = [text for text in found if "training_step changes" in text]
    assert len(told) == num
    assert all("self.num_steps, self.total. With schedule='1f1b'" in text for text in told)


# What steps are given, log and return ------------------------------------------------------------


# Models ------------------------------------------------------------------------------------------


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_batch_norm_with_whole_batches(pool: WorkerPool, tmp_path: Path, num_ranks: int) -> None:
    path = str(tmp_path / "norm.ckpt")
    training = Training(users.BatchNormModel, DataSpec(num_samples=21), num_steps=8, save_as=path)
    expected = train_one_device(training).weights
    results = assert_equal_training(pool, training, num_ranks=num_ranks, num_microbatches=1)
    saved = torch.load(path, weights_only=True)["state_dict"]
    for found in (results[0].weights, saved):
        assert not weight_differences(found, expected, 1e-14)
        for name in ("first.1", "third.0"):
            assert int(found[f"{name}.num_batches_tracked"]) == 8
            assert float(found[f"{name}.running_mean"].abs().max()) > 0


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_batch_norm_with_an_odd_last_batch(pool: WorkerPool, schedule: str) -> None:
    """Pairs in full batches; the last batch of five has no single sample, as BatchNorm needs it."""
    training = Training(users.BatchNormModel, DataSpec(num_samples=21), num_steps=4)
    results = train_pipeline(
        pool, training, num_ranks=2, num_microbatches=4, schedule=schedule, timeout=100.0
    )
    assert results[0].global_step == 4


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.spectral_norm:FutureWarning")
def test_buffers_that_change_once_per_call(pool: WorkerPool, schedule: str) -> None:
    """Counters and spectral norms: micro-batches are not more calls than the mini-batch is."""
    training = Training(users.CountedModel, DataSpec(num_samples=21), num_steps=6)
    results = assert_equal_training(
        pool, training, num_ranks=2, num_microbatches=4, schedule=schedule
    )
    assert float(results[0].weights["calls"]) == 12  # six calls for evaluation


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_batch_norm_counts_mini_batches(pool: WorkerPool, schedule: str) -> None:
    training = Training(users.BatchNormModel, DataSpec(num_samples=24), num_steps=5)
    results = train_pipeline(pool, training, num_ranks=2, num_microbatches=4, schedule=schedule)
    weights = results[0].weights
    assert int(weights["first.1.num_batches_tracked"]) == 5
    # without momentum it weighs the statistics of micro-batches
    assert int(weights["third.0.num_batches_tracked"]) == 20


@pytest.mark.parametrize(
    ("build", "num_microbatches", "schedule", "num_lines"),
    [
        (users.CentredModel, 4, "gpipe", 1),
        (users.CentredModel, 4, "1f1b", 1),
        (users.CentredModel, 1, "gpipe", 0),
        (users.BatchNormModel, 4, "gpipe", 0),
        (users.CountedModel, 4, "gpipe", 0),
    ],
)
def test_buffers_that_depend_on_the_samples(
    pool: WorkerPool, build: Any, num_microbatches: int, schedule: str, num_lines: int
) -> None:
    training = Training(build, DataSpec(num_samples=24), num_steps=4)
    arguments = {"num_microbatches": num_microbatches, "schedule": schedule, "timeout": 300.0}
    found = pool.run(warnings_of, training, arguments, 2, num_ranks=2)
    lines = [[line for line in lines if "micro-batches" in line] for lines in found]
    assert [len(each) for each in lines] == [num_lines, 0]
    assert all("centred.mean (of centred)" in line for line in lines[0])


def test_statistics_of_micro_batches_are_told(pool: WorkerPool) -> None:
    training = Training(users.BatchNormModel, DataSpec(num_samples=24), num_steps=2)
    arguments = {"num_microbatches": 4, "timeout": 300.0, "planner": "balanced"}
    found = pool.run(lines_of_fit, training, arguments, 2, num_ranks=2)
    told = [[line for line in lines if "each of the 4 micro-batches" in line] for lines in found]
    assert [len(each) for each in told] == [1, 0]


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_batch_without_samples(pool: WorkerPool, schedule: str) -> None:
    data = users.LastEmptyData(num_inputs=2)
    training = Training(users.SumModel, data, num_steps=3, validate=False)
    if schedule == "1f1b":  # which asks for means
        training = replace(training, build=users.MeanModel)
    assert_equal_training(pool, training, num_ranks=3, schedule=schedule, **STRATEGY)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_first_batch_without_samples(pool: WorkerPool, schedule: str) -> None:
    training = Training(users.SumModel, users.FirstEmptyData(num_inputs=2), num_steps=3)
    arguments = STRATEGY | {"schedule": schedule}
    training = replace(training, validate=False)
    for outcome in pool.outcomes(train, training, arguments, 3, num_ranks=3):
        assert "the first batch has no samples" in outcome.error


def test_a_logged_weight_of_another_rank_is_an_error(pool: WorkerPool) -> None:
    """It has no numbers there; nan would be a number."""
    training = Training(LogsOtherRanksWeights, num_steps=2, validate=False)
    plan = {"plan": [["first"], ["second", "head"]]}
    for outcome in pool.outcomes(train, training, plan, 2, num_ranks=2):
        assert "self.log('norm'): this code needs values of parameters" in outcome.error
