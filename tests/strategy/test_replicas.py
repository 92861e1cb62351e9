"""Replicas of stages in processes: data-parallel stages inside of a pipeline."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.jobs import actions_of_fit
from helpers.models import DataSpec, ExportableModel, TiedEmbeddings
from helpers.modules import PenaltyModel, TrainedAroundModel, epoch_checkpoints
from helpers.plans import captured_graph
from helpers.reference import (
    assert_equal_training,
    assert_same_training,
    train_one_device,
    train_pipeline,
)
from helpers.training import Training
from helpers.workers import WorkerError, WorkerPool
from torch import Tensor

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.planner import PLANNERS, Plan, plan_request, resolve_plan
from lightning_gpp.schedule import Action, Kind

BUILD = partial(ExportableModel, hidden=5, optimizer_name="adamw", scheduler="step")
TOWERS = ["left", "right"]
TOP = ["fuse", "norm", "head"]


def test_the_whole_model_on_all_devices(pool: WorkerPool) -> None:
    """Accumulated gradients, clipped by their norm; the last batch has two samples for four."""
    training = replace(
        Training(BUILD, DataSpec(num_inputs=2, num_samples=26)),
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    )
    results = assert_equal_training(pool, training, num_ranks=4, planner="data_parallel")
    assert all(result.own_parameters == results[0].own_parameters for result in results)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("num_last", [1, 3])
def test_a_last_batch_smaller_than_what_replicas_take_at_a_time(
    pool: WorkerPool, num_last: int
) -> None:
    """The first replicas take its few samples; the others get the gradients, too."""
    training = Training(TiedEmbeddings, DataSpec(tokens=True, num_samples=16 + num_last))
    plan = [
        {"modules": ["embed"], "devices": [0, 1]},
        {"modules": ["left", "right", "norm", "out"], "devices": [2, 1], "microbatch_multiple": 4},
    ]
    assert_equal_training(pool, training, num_ranks=3, num_microbatches=4, plan=plan)
    plan = [{"modules": [*TOWERS, *TOP], "devices": [0, 1, 2]}]
    training = Training(BUILD, DataSpec(num_inputs=2, num_samples=16 + num_last), num_steps=8)
    assert_equal_training(pool, training, num_ranks=3, num_microbatches=3, plan=plan)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_parameter_of_two_stages_with_replicas(pool: WorkerPool, schedule: str) -> None:
    """The embedding is also the output layer: two stages with replicas on other devices."""
    plan = [
        {"modules": ["embed"], "devices": [0, 1]},
        {"modules": ["left", "right"], "devices": [2, 3], "recompute": True},
        {"modules": ["norm", "out"], "devices": [1, 2], "microbatch_multiple": 4},
    ]
    training = Training(TiedEmbeddings, DataSpec(tokens=True))
    assert_equal_training(
        pool, training, num_ranks=4, num_microbatches=4, schedule=schedule, plan=plan
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_trainable_layers_around_replicas(pool: WorkerPool, schedule: str) -> None:
    """The user's step runs on the device of a replica; gradients go back to before the forward."""
    training = Training(TrainedAroundModel, DataSpec())
    plan = [{"modules": ["0", "1", "2"], "devices": [0, 1]}]
    assert_equal_training(
        pool,
        training,
        num_ranks=2,
        num_microbatches=4,
        module="net",
        plan=plan,
        schedule=schedule,
    )


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_loss_may_read_parameters_of_a_replica_on_its_rank(
    pool: WorkerPool, schedule: str
) -> None:
    """Their gradients come from the loss, and from the micro-batches of all replicas."""
    training = Training(PenaltyModel, DataSpec(num_inputs=2))
    plan = [{"modules": TOWERS, "device": 0}, {"modules": TOP, "devices": [1, 2]}]
    assert_equal_training(
        pool, training, num_ranks=3, num_microbatches=4, plan=plan, schedule=schedule
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas_first", [True, False])
def test_a_checkpoint_of_replicas_resumes_on_another_plan(
    pool: WorkerPool, tmp_path: Path, replicas_first: bool
) -> None:
    training = Training(BUILD, DataSpec(num_inputs=2))
    expected = train_one_device(training)
    replicas = [{"modules": TOWERS, "device": 0}, {"modules": TOP, "devices": [1, 2]}]
    plans: list[Any] = [replicas, [["left"], ["right"], TOP]]
    first, second = plans if replicas_first else reversed(plans)
    saving = replace(
        training,
        num_steps=8,
        trainer={"enable_checkpointing": True},
        callbacks=partial(epoch_checkpoints, str(tmp_path)),
    )
    strategy = {"num_ranks": 3, "num_microbatches": 2}
    train_pipeline(pool, saving, plan=first, **strategy)
    resumed = replace(training, checkpoint=str(tmp_path / "epoch=1.ckpt"))
    results = train_pipeline(pool, resumed, plan=second, **strategy)
    rest = replace(
        expected,
        losses=expected.losses[8:],
        learning_rates=expected.learning_rates[8:],
        validations=results[0].validations,  # compared by test_checkpoints
        logged=results[0].logged,
    )
    assert_same_training(results, rest, "float64")


def plan_of(*stages: dict[str, Any], **more: Any) -> Plan:
    graph = captured_graph(Training(BUILD, DataSpec(num_inputs=2)))
    return replace(resolve_plan(list(stages), graph), **more)


def test_the_plan_sets_the_number_of_microbatches(pool: WorkerPool) -> None:
    plan = plan_of(
        {"modules": TOWERS, "device": 0, "microbatch_multiple": 4},
        {"modules": TOP, "devices": [1, 2]},
        num_microbatches=8,
    )
    rows = pool.run(actions_of_fit, {"plan": plan, "timeout": 100.0}, 3, num_ranks=3)
    actions = [[Action.parse(text) for text in row] for row in rows]
    forwards = [[a.stage for a in row if a.kind is Kind.FORWARD] for row in actions]
    # Stage 0 takes four of eight at a time. Rank 0 has a replica of stage 1, the loss, the feed.
    assert [Counter(stages) for stages in forwards] == [{1: 4, 3: 4, -1: 4}, {0: 2}, {2: 4}]
    sums = [[str(a) for a in row if a.kind is Kind.REDUCE] for row in actions]
    assert sums == [["1R0"], [], ["2R0"]]


def test_a_number_of_microbatches_that_does_not_fit_the_plan(pool: WorkerPool) -> None:
    plan = plan_of(
        {"modules": TOWERS, "device": 0, "microbatch_multiple": 4},
        {"modules": TOP, "devices": [1, 2]},
    )
    with pytest.raises(WorkerError, match=r"num_microbatches=6 does not fit .* multiple of 4"):
        pool.run(
            actions_of_fit, {"plan": plan, "num_microbatches": 6, "timeout": 100.0}, 3, num_ranks=3
        )


FREE = Cluster((Device("a"), Device("b")), Link(bandwidth_bytes_per_s=1e15))
"""Sums of gradients and messages take no time, so that replicas are the fastest plan."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_replicas_with_unequal_shares(pool: WorkerPool, schedule: str) -> None:
    """Two thirds and one third of every micro-batch; the last batch has five samples for twelve."""
    training = Training(BUILD, DataSpec(num_inputs=2, num_samples=29))
    plan = [
        {"modules": TOWERS, "devices": [0, 1], "shares": [2, 1]},
        {"modules": TOP, "device": 2, "microbatch_multiple": 3},
    ]
    assert_equal_training(
        *(pool, training), num_ranks=3, num_microbatches=6, plan=plan, schedule=schedule
    )


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_fractions_of_odd_batches(pool: WorkerPool, schedule: str) -> None:
    """Nine, then five samples in eight parts, of which the replicas take five and three."""
    training = Training(
        BUILD, DataSpec(num_inputs=2, num_samples=23, batch_size=9, dtype="float64")
    )
    plan = [
        {"modules": TOWERS, "devices": [0, 2], "shares": [5, 3]},
        {"modules": TOP, "devices": [1, 0], "shares": [2, 6]},
    ]
    assert_equal_training(
        *(pool, training), num_ranks=3, num_microbatches=8, plan=plan, schedule=schedule
    )


class TwoTypes(ExportableModel):
    """One tower computes in float64, and is called between layers that do not."""

    def setup(self, stage: str) -> None:
        self.right.double()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        joined = torch.cat([self.left(left), self.right(right.double()).float()], dim=1)
        return self.head(self.norm(self.fuse(joined))) + self.offset


def test_parameters_of_two_types(pool: WorkerPool) -> None:
    """An all-reduce has gradients of one type."""
    training = Training(TwoTypes, DataSpec(num_inputs=2, dtype="float32"))
    plan = [
        {"modules": ["left", "right", "fuse"], "devices": [0, 1]},
        {"modules": ["norm", "head"], "device": 2},
    ]
    assert_equal_training(pool, training, num_ranks=3, num_microbatches=2, plan=plan)


@pytest.mark.parametrize("planner", ["data_parallel", "graphpipe"])
def test_planned_shares_by_speed(pool: WorkerPool, planner: str) -> None:
    """Device b takes three times as long, so that it gets two of eight samples."""
    training = Training(BUILD, DataSpec(num_inputs=2, num_samples=29, dtype="float64"))
    names = [operator.name for operator in captured_graph(training)]
    speeds = {"fast": 1.0, "slow": 3.0}
    costs = Costs(
        tuple(
            Profile(dict.fromkeys(names, OpProfile(one_s, one_s)), 1, kind)
            for kind, one_s in speeds.items()
        )
    )
    cluster = replace(FREE, devices=(Device("a", "fast"), Device("b", "slow")))
    strategy = {"costs": costs, "cluster": cluster, "planner": planner}
    request = plan_request(captured_graph(training), cluster, minibatch_size=8, costs=costs)
    plan = PLANNERS[planner](request)
    assert [stage.shares for stage in plan.stages] == [(3, 1)]
    assert_equal_training(pool, training, num_ranks=2, **strategy)
