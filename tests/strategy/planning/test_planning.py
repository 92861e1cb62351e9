"""How a run comes to its plan: the default, the cluster, the cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.jobs import lines_of_fit, plan_of_fit
from helpers.models import DataSpec
from helpers.modules import ChainModel
from helpers.planning_jobs import (
    LAYER_S,
    STEP_S,
    plan_and_messages,
    plan_without_search,
    said_in_fit,
)
from helpers.reference import assert_equal_training, assert_same_training, train_one_device
from helpers.training import Result, Training, train
from helpers.workers import WorkerPool

from lightning_gpp.cluster import Cluster, Device, Link, cluster_to_json
from lightning_gpp.planner import Plan, Stage, num_devices_used
from lightning_gpp.planner.plan.plan import plan_from_json
from lightning_gpp.planner.plan_to_run import PlanToRun, plan_to_run
from lightning_gpp.strategy import GraphPipeStrategy
from lightning_gpp.strategy.planning import planning
from lightning_gpp.strategy.report import ENOUGH_S, FEWEST_COUNTED, NUM_WARM_UP, WITHHELD

FREE = Link(bandwidth_bytes_per_s=1e15)


def test_by_default_every_device_is_used_and_the_planner_chooses_the_microbatches(
    pool: WorkerPool,
) -> None:
    shown = pool.run(plan_of_fit, {"timeout": 100.0}, 3, num_ranks=3)
    plan, _ = shown[0]
    assert num_devices_used(plan) == 3
    assert plan.num_microbatches is not None
    assert shown == [shown[0]] * 3


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("batch_size", [8, 10])
def test_what_the_planner_chooses_trains_as_one_device(pool: WorkerPool, batch_size: int) -> None:
    data = DataSpec(dtype="float64", batch_size=batch_size)
    assert_equal_training(pool, Training(ChainModel, data), num_ranks=2)


@pytest.mark.parametrize("order_pace", [0.0, 1.0])
def test_a_chain_that_goes_round_the_ranks_trains_as_one_device_in_any_order(
    pool: WorkerPool, order_pace: float
) -> None:
    names = ["layers_0", "layers_1", "layers_2", "layers_3", "layers_4", "layers_5"]
    stages = tuple(Stage(i, (name,), (i % 2,)) for i, name in enumerate(names))
    plan = Plan(stages, num_microbatches=4, order_pace=order_pace)
    training = Training(ChainModel, DataSpec(dtype="float64"))
    assert_equal_training(pool, training, num_ranks=2, plan=plan)


def test_the_fastest_schedule_trains_as_one_device(pool: WorkerPool) -> None:
    training = Training(ChainModel, DataSpec(dtype="float64"))
    assert_equal_training(pool, training, num_ranks=2, schedule="fastest", report="full")


def test_devices_may_stay_idle_where_that_is_asked_for(pool: WorkerPool) -> None:
    slow = Cluster((Device("a"), Device("b")), Link(bandwidth_bytes_per_s=1e3))
    strategy = {"use_all_devices": False, "cluster": slow}
    training = Training(ChainModel, DataSpec(dtype="float64"), num_steps=2)
    first, second = pool.run(lines_of_fit, training, strategy, 2, num_ranks=2)
    assert any("the plan uses 1 of 2 devices" in text for text in first), first
    assert not second


def test_a_cluster_file_with_too_little_memory_is_an_error(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = tmp_path / "small.json"
    path.write_text(
        cluster_to_json(Cluster((Device("a", memory_bytes=8), Device("b", memory_bytes=8)), FREE))
    )
    with pytest.raises(Exception, match=r"(?s)memory"):
        pool.run(plan_of_fit, {"cluster": str(path), "timeout": 100.0}, 2, num_ranks=2)


def test_the_second_run_finds_profile_and_plan(pool: WorkerPool, tmp_path: Path) -> None:
    strategy = {"cache": str(tmp_path), "timeout": 100.0}
    (plan, messages), other = pool.run(plan_and_messages, strategy, 2, num_ranks=2)
    assert messages == other[1] == []
    found, kept = kept_files = sorted(tmp_path.iterdir())
    assert kept.name.startswith("profile") and plan_from_json(found.read_text()).stages
    (again, (message,)), other = pool.run(plan_without_search, strategy, 2, num_ranks=2)
    assert again == plan
    assert message.startswith(f"The profile is of an earlier run: {kept}")
    assert sorted(tmp_path.iterdir()) == kept_files
    assert other[1] == []  # rank 0 alone looks


HALVES = [["layers.0", "layers.1", "layers.2"], ["layers.3", "layers.4", "layers.5"]]


def train_anew(training: Training, strategy: dict[str, Any], num_ranks: int) -> Result:
    """Trains by a plan that turns out, in the midst of a step, to need one per micro-batch."""

    def chosen(*question: Any) -> PlanToRun:
        found = plan_to_run(*question)
        return replace(found, request=replace(found.request, schedule="1f1b"))

    with mock.patch.object(planning, "plan_to_run", chosen):
        return train(training, strategy, num_ranks)


def test_a_step_that_begins_anew_leaves_every_rank_what_it_holds(pool: WorkerPool) -> None:
    training = Training(ChainModel, DataSpec(dtype="float64"), num_steps=2, validate=False)
    strategy = {"plan": HALVES, "num_microbatches": 4, "timeout": 100.0}
    results = pool.run(train_anew, training, strategy, 2, num_ranks=2)
    assert_same_training(results, train_one_device(training), "float64")
    assert results[1].own_parameters and results[0].own_parameters
    assert not results[0].own_parameters & results[1].own_parameters


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", [None, HALVES])
def test_the_verdict_waits_until_batches_tell_what_they_take(
    pool: WorkerPool, plan: list[list[str]] | None, tmp_path: Path
) -> None:
    strategy = {"plan": plan, "cache": str(tmp_path)}
    num_steps = NUM_WARM_UP + int(ENOUGH_S / STEP_S) + 2  # the clock begins in the first one
    (said, found), other = pool.run(said_in_fit, strategy, num_steps, 2, num_ranks=2)
    assert other[1] is None  # rank 0 times
    assert [text.split()[0] for text in said] == ["Verdict:", "Verdict:"]
    assert said[0].startswith(WITHHELD) and said[1].startswith("Verdict: 2 processes are ")
    assert found is not None
    is_estimated, times = found
    assert not is_estimated  # also of a plan by hand
    assert times is not None and times.own_s is not None
    assert times.batch_s - times.own_s >= LAYER_S
    assert times.own_s >= STEP_S  # though the calls are in the midst of it


def test_a_training_that_ends_before_says_what_was_predicted(pool: WorkerPool) -> None:
    for strategy in ({}, {"schedule": "1f1b"}):  # whose step runs in the pipeline
        (said, _), _ = pool.run(said_in_fit, strategy, FEWEST_COUNTED, 2, num_ranks=2)
        assert said[0].startswith(WITHHELD) and len(said) == 2
        assert "predicted" in said[1] and "median" not in said[1]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"num_microbatches": 3.5}, "num_microbatches must be a whole number .* got 3.5"),
        ({"num_microbatches": 0}, "num_microbatches must be at least 1, got 0"),
        ({"pipelines": "two"}, "pipelines must be a whole number .* got 'two'"),
        ({"timeout": "long"}, "timeout is in seconds .* got 'long'"),
        ({"use_all_devices": "no"}, "use_all_devices must be True or False, got 'no'"),
        ({"start_method": "pop"}, "unknown start_method 'pop'; .* popen"),
    ],
)
def test_numbers_and_flags_that_make_no_sense(option: dict[str, Any], said: str) -> None:
    """They ended in a bare TypeError on a rank, or ``"no"`` meant yes."""
    with pytest.raises(ValueError, match=said):
        GraphPipeStrategy(**option)


def test_mistakes_are_found_at_once() -> None:
    with pytest.raises(ValueError, match="cluster='sumit' is neither a preset"):
        GraphPipeStrategy(cluster="sumit")
    with pytest.raises(ValueError, match="unknown planner 'best'"):
        GraphPipeStrategy(planner="best")
