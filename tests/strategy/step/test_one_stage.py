"""One stage on one device in one piece: the user's own autograd, to the bit what one device does.

batch ──▶ the whole forward, in the step's own graph ──▶ loss ──▶ backward
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import user_modules as users
from helpers.models import FIXED_MODELS, DataSpec, ExportableModel
from helpers.random_models import BranchyModel, OptimizerSpec
from helpers.reference import (
    assert_same_training,
    train_one_of_their_devices,
    weight_differences,
)
from helpers.training import Training, train
from helpers.workers import WorkerPool
from lightning.pytorch.callbacks import Callback, ModelPruning
from torch import Tensor

from lightning_gpp.strategy import TimelineCallback

DATA = DataSpec(num_samples=21, num_inputs=2)
SINGLE = DataSpec(num_samples=21, num_inputs=2, dtype="float32")
STRATEGY: dict[str, Any] = {"num_microbatches": 1, "timeout": 100.0, "cache": False}


class PenaltyModel(ExportableModel):
    """Adds the length of the gradient by the inputs to its loss: a second derivative."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = [x.clone().requires_grad_() for x in batch[0]]
        total = self(*inputs).square().sum()
        gradients = torch.autograd.grad(total, inputs, create_graph=True)
        penalty = torch.stack([gradient.square().mean() for gradient in gradients]).sum()
        return super().training_step(batch, batch_idx) + 0.1 * penalty


class CheckpointedModel(ExportableModel):
    """Its backward runs the forward once more."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        outputs = torch.utils.checkpoint.checkpoint(self, *inputs, use_reentrant=False)
        loss = torch.nn.functional.mse_loss(outputs, targets)
        self.log("train_loss", loss)
        return loss


class HookedModel(ExportableModel):
    """Changes outputs and gradients in hooks of a layer, a parameter and the result."""

    def __init__(self) -> None:
        super().__init__()
        self.fuse.register_forward_hook(lambda module, inputs, output: output * 1.1)
        self.head.weight.register_hook(lambda gradient: gradient * 0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        with torch.no_grad():
            before = self(*inputs)
        outputs = self(*inputs)
        outputs.register_hook(lambda gradient: gradient + before)
        loss = torch.nn.functional.mse_loss(outputs, targets)
        self.log("train_loss", loss)
        return loss


class ClosureModel(ExportableModel):
    """Its optimizer asks for the loss several times per step, and for inner products."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class ReadingModel(ExportableModel):
    """Takes its batches from the loader by itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        inputs, targets = self.transfer_batch_to_device(batch, self.device, 0)
        loss = torch.nn.functional.mse_loss(self(*inputs), targets)
        self.log("train_loss", loss, batch_size=len(targets))
        return loss


def branchy(name: str, **trainer: Any) -> Training:
    spec = FIXED_MODELS[name]
    data = DataSpec(num_inputs=spec.num_inputs, num_samples=21)
    return Training(partial(BranchyModel, spec, OptimizerSpec()), data, trainer=trainer)


def recorded(folder: str) -> list[Any]:
    return [TimelineCallback((1, 2), dirpath=folder, picture=False)]


def assert_same_bits(pool: WorkerPool, training: Training) -> None:
    """Trains on one device, plainly and with the strategy, and compares."""
    expected = train_one_of_their_devices(training)
    (result,) = pool.run(train, training, STRATEGY, 1, num_ranks=1)
    assert_same_training([result], expected, training.data.dtype)
    assert not weight_differences(result.weights, expected.weights, 0.0)


@pytest.mark.parametrize(
    "training",
    [
        branchy("shared_weights", accumulate_grad_batches=2),
        branchy("two_towers", gradient_clip_val=0.05, gradient_clip_algorithm="value"),
        Training(partial(users.HandMadeRateModel, "training_step"), DATA, num_steps=8),
        Training(PenaltyModel, DATA, num_steps=8),
        Training(CheckpointedModel, DATA, num_steps=8),
        Training(HookedModel, DATA, num_steps=8),
        Training(ClosureModel, DATA, num_steps=4),
        Training(ReadingModel, DATA, num_steps=8),
        Training(ExportableModel, SINGLE, num_steps=8, trainer={"precision": "bf16-mixed"}),
    ],
    ids=[
        "accumulation",
        "clipping",
        "rate by hand",
        "second derivatives",
        "checkpoint of forward",
        "hooks",
        "closures",
        "batches read by the step",
        "autocast",
    ],
)
def test_trains_as_plain_lightning(pool: WorkerPool, training: Training) -> None:
    assert_same_bits(pool, training)


def test_recorded_steps_train_alike(pool: WorkerPool, tmp_path: Path) -> None:
    """They run as a program; the steps before and after them do not."""
    callbacks = partial(recorded, str(tmp_path))
    training = Training(ExportableModel, DATA, num_steps=6, callbacks=callbacks)
    expected = train_one_of_their_devices(Training(ExportableModel, DATA, num_steps=6))
    (result,) = pool.run(train, training, STRATEGY, 1, num_ranks=1)
    assert not weight_differences(result.weights, expected.weights, 0.0)
    assert result.losses == expected.losses
    assert list(tmp_path.iterdir()), "no step was recorded"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_several_pieces_run_as_a_program(pool: WorkerPool, num_microbatches: int) -> None:
    training = Training(ExportableModel, DATA, num_steps=8)
    expected = train_one_of_their_devices(training)
    strategy = STRATEGY | {"num_microbatches": num_microbatches}
    (result,) = pool.run(train, training, strategy, 1, num_ranks=1)
    assert_same_training([result], expected, DATA.dtype)


@pytest.mark.parametrize(("num_ranks", "schedule"), [(1, "1f1b"), (2, "gpipe")])
def test_a_step_that_reads_batches_is_refused_with_others(
    pool: WorkerPool, num_ranks: int, schedule: str
) -> None:
    """Neither a step per micro-batch nor another rank can follow it."""
    training = Training(ReadingModel, DATA, num_steps=2, validate=False)
    options = STRATEGY | {"schedule": schedule}
    outcomes = pool.outcomes(train, training, options, num_ranks, num_ranks=num_ranks)
    assert {outcome.error_type for outcome in outcomes} == {"NotImplementedError"}
    assert "let it take `batch`" in outcomes[0].error


def pruning(**options: Any) -> list[Callback]:
    return [ModelPruning("l1_unstructured", amount=0.3, **options)]


@pytest.mark.parametrize(
    "options",
    [{}, {"use_lottery_ticket_hypothesis": False}, {"make_pruning_permanent": False}],
    ids=["default", "weights kept", "masks kept"],
)
def test_pruning_is_that_of_one_device(pool: WorkerPool, options: dict[str, Any]) -> None:
    """It renames parameters at the end of an epoch; training goes on with masks."""
    data = replace(DATA, num_samples=16)
    callbacks = partial(pruning, **options)
    training = Training(ExportableModel, data, num_steps=6, callbacks=callbacks)
    (result,) = pool.run(train, training, STRATEGY | {"num_microbatches": 2}, 1, num_ranks=1)
    expected = train_one_of_their_devices(training)
    assert_same_training([result], expected, data.dtype)
    assert any(bool((weight == 0).any()) for weight in result.weights.values())
