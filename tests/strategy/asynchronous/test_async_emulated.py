"""Asynchronous training on emulated devices: it learns the same, and says what it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from helpers.training import make_trainer, quiet, real_tensors
from helpers.workers import WorkerPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpp import EmulatedAccelerator
from lightning_gpp.cluster import Cluster, Device, DeviceKind, Link
from lightning_gpp.emulation.report import (
    EmulationReport,
)

SLOW = DeviceKind("abacus", {"float64": 1e5}, 1e12, source="made up")
CHAIN = [["towers.0.0"], ["towers.0.1"], ["towers.0.2"], ["join"]]
BRANCHES = [["towers.0.0"], ["towers.1.0"], ["join"]]


class Layer(nn.Module):
    """One stage, of what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, *values: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.stack(values).sum(0)))


class Towers(lp.LightningModule):
    """Parallel chains of layers and a join.

    Args:
        shape: layers of every chain.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.towers = nn.ModuleList(nn.ModuleList(Layer() for _ in range(n)) for n in shape)
        self.join = Layer()

    def forward(self, x: Tensor) -> Tensor:
        ends = []
        for tower in self.towers:
            value = x
            for layer in tower:
                value = layer(value)
            ends.append(value)
        return self.join(*ends)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", (self(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


@dataclass
class Trained:
    """What a rank has after a fit.

    Attributes:
        weights: as they were trained.
        report: of the emulation, on rank 0.
        metrics: of the Trainer.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    report: EmulationReport | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def loader(count: int = 12) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(4 * count, 4, generator=generator).double() for _ in range(2))
    return DataLoader(TensorDataset(x, y), batch_size=4)


def fit(
    plan: Any,
    *,
    is_emulated: bool,
    weights: str = "pipeoptim",
    tensors: Any = "real",
    callbacks: Sequence[lp.Callback] = (),
    **trainer: Any,
) -> Trained:
    num_ranks = len(plan)
    if is_emulated:
        devices = tuple(Device(f"abacus:{index}", SLOW.name) for index in range(num_ranks))
        cluster = Cluster(devices, Link(1e6, 1e-4), device_kinds=(SLOW,))
        trainer["accelerator"] = EmulatedAccelerator(cluster, tensors=tensors)
    strategy = {"schedule": "1f1b-async", "weights": weights, "plan": plan, "timeout": 100.0}
    shape = [sum(f"towers.{n}." in name for (name,) in plan) for n in range(num_ranks)]
    module = Towers([size for size in shape if size]).double()
    with quiet():
        host = make_trainer(
            strategy, num_ranks, callbacks=list(callbacks), **{"max_epochs": 1} | trainer
        )
        host.fit(module, loader(), loader(3))
    own: Any = host.strategy
    numbers = {name: float(value) for name, value in host.callback_metrics.items()}
    return Trained(real_tensors(module), own.emulation_report, numbers)


class SavesOnce(lp.Callback):
    """Saves a checkpoint in the middle, after which the pipeline fills anew."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 7:
            trainer.save_checkpoint("middle.ckpt")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("plan", "weights"), [(CHAIN, "pipeoptim"), (BRANCHES, "stash"), (BRANCHES, "flush")], ids=str
)
def test_it_learns_what_it_learns_without(pool: WorkerPool, plan: Any, weights: str) -> None:
    """Bit for bit, with a validation and a checkpoint in the middle."""
    trained = [
        pool.run(
            fit,
            plan,
            is_emulated=is_emulated,
            weights=weights,
            callbacks=[SavesOnce()],
            val_check_interval=4,
            num_ranks=len(plan),
        )
        for is_emulated in (False, True)
    ]
    for plain, emulated in zip(*trained, strict=True):
        assert plain.weights.keys() == emulated.weights.keys()
        for name, value in plain.weights.items():
            assert torch.equal(emulated.weights[name], value), name
    assert trained[0][0].weights and trained[0][0].report is None
    assert trained[1][0].metrics["validation"] == trained[0][0].metrics["validation"]


def test_what_a_mini_batch_takes_is_reported(pool: WorkerPool) -> None:
    first, *_ = pool.run(fit, CHAIN, is_emulated=True, max_epochs=2, num_ranks=4)
    report = first.report
    assert report is not None and report.bound_s is not None
    assert len(report.step_s) == 12 - 3 - 8  # twice round, and what drains, left out
    assert report.bound_s <= report.predicted_s * (1 + 1e-9)
    assert first.metrics["emulated_step_s"] == pytest.approx(report.typical_s)
    assert first.metrics["busiest_device_s"] == pytest.approx(report.bound_s)
    assert "Steps overlap" in report.text() and "per step" in report.text()
