"""What users have beside plain training, on GPUs: as on one device, or as on CPUs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from helpers.full_graph import FullGraphJob, NodeClassifier, fit
from helpers.models import (
    FIXED_MODELS,
    DataSpec,
    ExportableModel,
    TiedEmbeddings,
)
from helpers.random_models import BranchyModel, OptimizerSpec
from helpers.reference import (
    RELATIVE_TOLERANCE,
    assert_equal_training,
    assert_same_training,
    train_one_device,
    train_pipeline,
)
from helpers.training import Training, make_trainer, quiet, train
from helpers.workers import WorkerPool
from torch import Tensor

BUILD = partial(ExportableModel, hidden=5, optimizer_name="adamw", scheduler="step")
DATA = DataSpec(num_inputs=2, num_samples=26)
PLAIN = Training(BUILD, DATA, num_steps=6)
TWO_TOWERS = Training(
    partial(BranchyModel, FIXED_MODELS["two_towers"], OptimizerSpec()),
    DataSpec(num_inputs=FIXED_MODELS["two_towers"].num_inputs),
    num_steps=6,
)
REPLICAS_THAT_SHARE = [
    {"modules": ["embed"], "devices": [0, 1]},
    {"modules": ["left", "right"], "devices": [2, 3], "recompute": True},
    {"modules": ["norm", "out"], "devices": [1, 2], "microbatch_multiple": 4},
]
ONE_CUT = [
    {"modules": ["left", "right"], "device": 1},
    {"modules": ["fuse", "norm", "head"], "device": 0},
]
HAP = {"kind": "HAPStrategy", "planner": "data_parallel"}


AS_ONE_DEVICE: dict[str, tuple[Training, int, dict[str, Any]]] = {
    "replicas": (PLAIN, 2, {"planner": "data_parallel"}),
    "accumulated and clipped": (
        replace(PLAIN, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        2,
        {"planner": "balanced", "num_microbatches": 4},
    ),
    "replicas, shared parameters, recompute": (
        Training(TiedEmbeddings, DataSpec(tokens=True), num_steps=6),
        4,
        {"num_microbatches": 4, "plan": REPLICAS_THAT_SHARE},
    ),
    "the same in 1f1b": (
        Training(TiedEmbeddings, DataSpec(tokens=True), num_steps=6),
        4,
        {"num_microbatches": 4, "plan": REPLICAS_THAT_SHARE, "schedule": "1f1b"},
    ),
    "hap on two": (TWO_TOWERS, 2, {**HAP, "shares": [0.7, 0.3]}),
    "hap on three": (TWO_TOWERS, 3, {**HAP, "shares": [0.5, 0.2, 0.3]}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", AS_ONE_DEVICE)
def test_as_one_device(gpus: WorkerPool, name: str) -> None:
    training, num_ranks, strategy = AS_ONE_DEVICE[name]
    assert_equal_training(gpus, training, num_ranks=num_ranks, **strategy)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("planner", ["balanced", "data_parallel"])
@pytest.mark.parametrize("devices", ["cuda:0 cuda:0", "cuda:0 cpu", "cpu cuda:0"])
def test_a_pool(gpus: WorkerPool, devices: str, planner: str) -> None:
    """Messages and sums are staged through host memory."""
    pooled = replace(PLAIN, trainer={"accelerator": "pool", "devices": devices.split()})
    results = train_pipeline(gpus, pooled, num_ranks=2, planner=planner)
    assert_same_training(results, train_one_device(PLAIN), DATA.dtype)


HALF = replace(PLAIN, data=replace(DATA, dtype="float32"))
AS_CPUS: dict[str, tuple[Training, int, dict[str, Any]]] = {
    "pipelines side by side": (PLAIN, 4, {"pipelines": 2, "num_microbatches": 2}),
    "asynchronous": (
        Training(partial(ExportableModel, hidden=5), DATA, num_steps=6),
        2,
        # Which weights are how old depends on the cut: a plan by measured times is not the same.
        {"schedule": "1f1b-async", "plan": ONE_CUT},
    ),
    "bf16-mixed": (
        replace(HALF, trainer={"precision": "bf16-mixed"}),
        2,
        {"planner": "balanced", "num_microbatches": 2},
    ),
}


@pytest.mark.parametrize("name", AS_CPUS)
def test_as_cpus(gpus: WorkerPool, pool: WorkerPool, name: str) -> None:
    training, num_ranks, strategy = AS_CPUS[name]
    arguments = (train, training, {"timeout": 100, "cache": False, **strategy}, num_ranks)
    expected = pool.run(*arguments, num_ranks=num_ranks)[0]
    found = gpus.run(*arguments, num_ranks=num_ranks)[0]
    is_half = "precision" in training.trainer  # which operators it casts, depends on the device
    rtol = 1e-2 if is_half else RELATIVE_TOLERANCE[training.data.dtype]
    assert found.losses == pytest.approx(expected.losses, rel=rtol)
    for key, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[key], weight, rtol=rtol, atol=rtol)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("ways", [1, 2])
def test_a_full_graph(gpus: WorkerPool, ways: int) -> None:
    job = FullGraphJob(partial(NodeClassifier, "gcn"), epochs=6)
    expected = fit(job, None)
    strategy = {"mode": "exact", "ways": ways, "seed": 3}
    results = gpus.run(fit, job, strategy, 2, num_ranks=2)
    assert results[0]["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)


def test_chunks_of_a_full_graph(gpus: WorkerPool, pool: WorkerPool) -> None:
    job = FullGraphJob(partial(NodeClassifier, "sage"), epochs=6)
    arguments = (fit, job, {"chunks": 4, "seed": 3}, 2)
    expected = pool.run(*arguments, num_ranks=2)[0]
    found = gpus.run(*arguments, num_ranks=2)[0]
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_resumed_on_another_number_of_gpus(gpus: WorkerPool, kind: str, tmp_path: Path) -> None:
    expected = train_one_device(replace(PLAIN, num_steps=8))
    saved = str(tmp_path / "saved.ckpt")
    strategy = {"planner": "balanced", "num_microbatches": 2, "state_dict_type": kind}
    first = replace(PLAIN, num_steps=4, save_as=saved)
    train_pipeline(gpus, first, num_ranks=2, **strategy)
    rest = replace(PLAIN, num_steps=8, checkpoint=saved)
    results = train_pipeline(gpus, rest, num_ranks=3, **strategy)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(results[0].weights[name], weight, rtol=1e-9, atol=1e-9)


def test_predictions_without_a_fit(gpus: WorkerPool) -> None:
    """Weights that move in inference mode stay ordinary ones, which train afterwards."""
    expected = predictions_then_losses(1)
    strategy = {"planner": "balanced", "num_microbatches": 2}
    found = gpus.run(predictions_then_losses, 2, strategy, num_ranks=2)[0]
    for batch, other in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(batch, other, rtol=1e-9, atol=1e-9)
    assert found[1] == pytest.approx(expected[1], rel=1e-9)


class Predicting(ExportableModel):
    """Has a step to predict with."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.call_forward(batch[0])


def predictions_then_losses(
    num_ranks: int, strategy: dict[str, Any] | None = None
) -> tuple[list[Tensor], list[float]]:
    """Predictions of a new model, and losses of its training after them."""
    module = Predicting(hidden=5).double()
    with quiet():
        found = make_trainer(strategy, num_ranks).predict(module, DATA.loader())
        losses = Losses()
        trainer = make_trainer(strategy, num_ranks, max_steps=4, callbacks=[losses])
        trainer.fit(module, DATA.loader())
    return [batch.cpu() for batch in found or [] if batch is not None], losses.seen


class Losses(lp.Callback):
    """Notes them."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: lp.Trainer, *_: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["train_loss"]))


class Weights(lp.Callback):
    """Reads all weights together, and keeps them, on every rank."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {}

    def on_train_epoch_end(self, trainer: lp.Trainer, pl_module: lp.LightningModule) -> None:
        parameters = list(pl_module.parameters())
        assert {parameter.device for parameter in parameters} == {pl_module.device}
        lengths = torch.stack([parameter.detach().norm() for parameter in parameters])
        largest = torch.stack([parameter.data.abs().max() for parameter in parameters])
        assert lengths.device == pl_module.device
        kept = {key: value.cpu() for key, value in pl_module.state_dict().items()}
        total = sum(value.sum() for value in kept.values())
        pl_module.fuse.weight.new_zeros(3).add_(pl_module.fuse.weight.sum())
        self.record[f"{len(self.record)}"] = [float(lengths.norm()), float(largest.sum() * total)]


def test_all_weights_are_read_as_on_one_device(gpus: WorkerPool) -> None:
    """A rank has those of other ranks in host memory meanwhile."""
    training = replace(PLAIN, callbacks=read_weights)
    expected = train_one_device(training).extra
    results = train_pipeline(gpus, training, num_ranks=2, planner="balanced")
    assert expected
    for result in results:
        assert set(result.extra) == set(expected)
        for epoch, numbers in expected.items():
            assert result.extra[epoch] == pytest.approx(numbers, rel=1e-9)


def read_weights() -> list[lp.Callback]:
    return [Weights()]
