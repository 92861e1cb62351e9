"""Training of modules that are made in ``configure_model``."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from helpers.training import Result, Training, make_trainer, quiet, real_tensors, train
from lightning_gpp import mapped_tensor


class _First(lp.Callback):
    """Records what a rank begins with."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {}

    def on_fit_start(self, trainer: lp.Trainer, pl_module: lp.LightningModule) -> None:
        self.record = {
            "first": real_tensors(pl_module),
            "drawn": torch.rand(()).item(),
            "in files": all(map(mapped_tensor.is_mapped, pl_module.parameters())),
        }


def train_late(
    training: Training, strategy: Mapping[str, Any] | None, num_ranks: int = 1
) -> Result:
    """Trains with parameters in files, however small they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped_tensor, "LEAST_BYTES", 1)
        given = training.callbacks
        training = replace(training, callbacks=lambda: [_First(), *given()])
        return train(training, strategy, num_ranks)


class LargeModel(lp.LightningModule):
    """72 MiB of weights."""

    num_layers, width = 8, 1536

    def configure_model(self) -> None:
        layers = [nn.Linear(self.width, self.width, bias=False) for _ in range(self.num_layers)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Memory:
    """Of one rank.

    Attributes:
        peak_bytes: of this process's own memory at any time, over that before there was a model.
        held_bytes: of the parameters of its stages.
    """

    peak_bytes: int
    held_bytes: int


class _Peak(lp.Callback):
    """Looks every two milliseconds."""

    def setup(self, trainer: lp.Trainer, pl_module: lp.LightningModule, stage: str) -> None:
        self.peak = self.base = _own_bytes()
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self._look)
        self.thread.start()

    def _look(self) -> None:
        while not self.is_over.is_set():
            self.peak = max(self.peak, _own_bytes())
            time.sleep(0.002)

    def on_train_end(self, trainer: lp.Trainer, pl_module: lp.LightningModule) -> None:
        self.held = sum(tensor.nbytes for tensor in real_tensors(pl_module).values())

    def teardown(self, trainer: lp.Trainer, pl_module: lp.LightningModule, stage: str) -> None:
        self.is_over.set()
        self.thread.join()


def _own_bytes() -> int:
    """Memory of this process that no file has, as Linux counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def peak_of_training(num_ranks: int) -> Memory:
    """Trains the large model for two steps."""
    callback = _Peak()
    stages = [[f"layers.{i}", f"layers.{i + 1}"] for i in range(0, LargeModel.num_layers, 2)]
    strategy = {"num_microbatches": 2, "plan": stages, "timeout": 60.0}
    data = DataLoader(TensorDataset(torch.randn(8, LargeModel.width)), batch_size=4)
    with quiet():
        trainer = make_trainer(strategy, num_ranks, max_steps=2, callbacks=[callback])
        trainer.fit(LargeModel(), data)
    return Memory(callback.peak - callback.base, callback.held)
