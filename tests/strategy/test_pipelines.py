"""Several pipelines side by side: as Lightning's DDP over as many processes."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from helpers.faults import FAULTY_BATCH, FailingStepModel
from helpers.models import DataSpec, ExportableModel
from helpers.modules import MetricsModel, UnusedParameterModel
from helpers.plans import captured_graph, random_plan
from helpers.random_models import (
    BranchyModel,
    ModelSpec,
    OptimizerSpec,
    model_specs,
    optimizer_specs,
)
from helpers.reference import (
    RELATIVE_TOLERANCE,
    assert_equal_copies,
    assert_same_training,
    relative_error,
    train_one_device,
    train_pipeline,
    weight_differences,
)
from helpers.training import Result, Training, float16_mixed, train
from helpers.user_modules import BatchNormModel
from helpers.workers import WorkerPool
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gpp.strategy import GNNPipeStrategy, GraphPipeStrategy

BUILD = partial(ExportableModel, hidden=5, optimizer_name="adamw", scheduler="step")
PLAN = [["left", "right"], ["fuse", "norm", "head"]]
DATA = DataSpec(num_inputs=2, num_samples=40, batch_size=4)


def as_ddp(pool: WorkerPool, training: Training, kind: str = "ddp") -> list[Result]:
    """Trains with Lightning's DDP, one process for each of two pipelines."""
    return pool.run(train, training, {"kind": kind}, 2, num_ranks=2)


def assert_as_ddp(pool: WorkerPool, training: Training, ranks: int, **strategy: Any) -> None:
    """Trains both ways and compares what each rank of DDP has with its pipeline."""
    expected = as_ddp(pool, training)
    results = train_pipeline(pool, training, num_ranks=2 * ranks, pipelines=2, **strategy)
    tolerance = RELATIVE_TOLERANCE[training.data.dtype]
    assert not weight_differences(results[0].weights, expected[0].weights, tolerance)
    assert_equal_copies(results)
    for pipeline, of_ddp in enumerate(expected):
        for result in results[pipeline * ranks : (pipeline + 1) * ranks]:
            for name in ("losses", "learning_rates"):
                got, want = (torch.tensor(getattr(each, name)) for each in (result, of_ddp))
                assert relative_error(got, want) < tolerance, (pipeline, name)
            assert result.final_metrics == pytest.approx(of_ddp.final_metrics, rel=1e-9)
            assert result.global_step == of_ddp.global_step


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_as_many_replicas_of_ddp(pool: WorkerPool, schedule: str) -> None:
    """Shuffled samples are dealt; accumulated gradients are averaged and clipped by their norm."""
    training = replace(
        Training(BUILD, DATA), trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    )
    assert_as_ddp(pool, training, 2, schedule=schedule, plan=PLAN, num_microbatches=2)


# Shrinking would train hundreds of pipelines; the models are small enough to read as they are.
@settings(
    max_examples=max(4, settings.default.max_examples // 4),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(
    spec=model_specs(),
    optimizer=optimizer_specs(),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    num_microbatches=st.integers(1, 3),
    plan_seed=st.integers(0, 999),
)
def test_random_models(
    pool: WorkerPool,
    spec: ModelSpec,
    optimizer: OptimizerSpec,
    schedule: str,
    num_microbatches: int,
    plan_seed: int,
) -> None:
    """Two pipelines of up to two devices; the last batch of each has fewer samples."""
    data = DataSpec(num_inputs=spec.num_inputs, num_samples=26, batch_size=4)
    training = Training(partial(BranchyModel, spec, optimizer), data, num_steps=10)
    graph = captured_graph(training)
    plan = random_plan(graph, num_devices=min(2, len(graph)), seed=plan_seed)
    options = {"schedule": schedule, "plan": plan, "num_microbatches": num_microbatches}
    assert_as_ddp(pool, training, plan.num_devices, **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision(pool: WorkerPool, precision: str, schedule: str) -> None:
    """The loss scale is one over the pipelines, too: an infinity in one skips the step of all."""
    mixed = {"precision": precision}
    if precision == "16-mixed":
        mixed = {"plugins": [float16_mixed(init_scale=2.0**13, growth_interval=1)]}
    training = Training(BUILD, replace(DATA, dtype="float32"), num_steps=8, trainer=mixed)
    expected = as_ddp(pool, copy.deepcopy(training))
    options = {"schedule": schedule, "plan": PLAN, "num_microbatches": 1}
    results = train_pipeline(pool, training, num_ranks=4, pipelines=2, **options)
    limit = 16 * 2.0 ** (-11 if precision.startswith("16") else -8)
    assert not weight_differences(results[0].weights, expected[0].weights, limit)
    assert_equal_copies(results)
    for pipeline, of_ddp in enumerate(expected):
        assert results[2 * pipeline].losses == pytest.approx(of_ddp.losses, abs=4 * limit)


def test_buffers_are_those_of_the_first_pipeline(pool: WorkerPool) -> None:
    """Running statistics, which validation in the second one sees, too."""
    assert_as_ddp(
        pool, Training(BatchNormModel, replace(DATA, num_inputs=1)), 2, num_microbatches=1
    )


def test_values_reduced_over_pipelines(pool: WorkerPool) -> None:
    """Metrics are of all samples, and values that are to be synchronized are means over them."""
    assert_as_ddp(pool, Training(ReducingModel, DATA), 1)


def test_a_layer_that_one_pipeline_does_not_use(pool: WorkerPool) -> None:
    training = Training(UnusedParameterModel, DATA)
    expected = as_ddp(pool, training, "ddp_find_unused_parameters_true")
    results = train_pipeline(pool, training, num_ranks=4, pipelines=2, num_microbatches=2)
    assert not weight_differences(results[0].weights, expected[0].weights, 1e-9)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b-async"])
def test_pipelines_of_the_same_samples_are_one(pool: WorkerPool, schedule: str) -> None:
    """The mean of equal gradients changes nothing, also where steps overlap."""
    training = Training(BUILD, DATA, validate=False, trainer={"use_distributed_sampler": False})
    one = train_pipeline(pool, training, num_ranks=2, schedule=schedule, plan=PLAN)
    two = train_pipeline(pool, training, num_ranks=4, pipelines=2, schedule=schedule, plan=PLAN)
    assert_same_training(two, one[0], training.data.dtype)


def test_a_checkpoint_is_that_of_one_device(pool: WorkerPool, tmp_path: Path) -> None:
    """Saved by two pipelines, read by one device, which goes on as two pipelines would."""
    path = str(tmp_path / "last.ckpt")
    training = Training(BUILD, DATA, trainer={"use_distributed_sampler": False})
    first = replace(training, num_steps=10, save_as=path)
    train_pipeline(pool, first, num_ranks=4, pipelines=2, plan=PLAN)
    later = replace(training, checkpoint=path)
    resumed = train_pipeline(pool, later, num_ranks=4, pipelines=2, plan=PLAN)
    expected = train_one_device(later)
    assert not weight_differences(resumed[0].weights, expected.weights, 1e-9)


def test_an_error_in_one_pipeline_ends_all(pool: WorkerPool) -> None:
    training = Training(FailsInSecondPipeline, replace(DATA, num_inputs=2))
    outcomes = pool.outcomes(
        train, training, {"pipelines": 2, "plan": PLAN, "timeout": 100}, 4, num_ranks=4
    )
    assert all(outcome.failed and not outcome.hung for outcome in outcomes)
    for outcome in outcomes:
        assert "the second pipeline fails" in outcome.error
    for outcome in outcomes[:2]:
        assert "rank 2 failed" in outcome.traceback


def test_bad_numbers() -> None:
    with pytest.raises(ValueError, match="pipelines must be at least 1, got 0"):
        GraphPipeStrategy(pipelines=0)


def test_an_unknown_reduction_is_named() -> None:
    strategy = GraphPipeStrategy(pipelines=2)
    strategy.peers = cast(Any, object())  # who are not asked
    with pytest.raises(ValueError, match=r"reduce_op='prod' over pipelines; known: mean, sum, .*"):
        strategy.reduce(torch.ones(1), reduce_op="prod")


def test_devices_that_cannot_be_divided(pool: WorkerPool) -> None:
    training = Training(BUILD, DATA)
    for outcome in pool.outcomes(train, training, {"pipelines": 2}, 3, num_ranks=3):
        assert "3 devices cannot be 2 pipelines of equal size" in outcome.error
    gnn = {"kind": GNNPipeStrategy.__name__, "pipelines": 2}
    for outcome in pool.outcomes(train, training, gnn, 2, num_ranks=2):
        assert "unknown option 'pipelines'; known options: " in outcome.error


class ReducingModel(MetricsModel):
    """Reduces what it logs over replicas, and gathers a value of each."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss, outputs = self.step_loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        worst = (outputs[0] - batch[1]).abs().max()
        self.log("worst", worst, on_epoch=True, reduce_fx="max", sync_dist=True)
        gathered = self.all_gather(loss.detach())
        self.log("spread", gathered.max() - gathered.min())
        for op in ("sum", "min", "product", dist.ReduceOp.PRODUCT):
            name = str(op).rpartition(".")[2]
            self.log(name, self.trainer.strategy.reduce(loss.detach().clone(), reduce_op=op))
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, _ = self.step_loss(batch)
        self.log("val_loss", loss, sync_dist=True)


class FailsInSecondPipeline(FailingStepModel):
    """A pipeline whose user code fails while the other goes on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == FAULTY_BATCH and self.trainer.global_rank == 2:
            raise ValueError("the second pipeline fails")
        return ExportableModel.training_step(self, batch, batch_idx)
