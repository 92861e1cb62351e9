"""Training of modules that are made in ``configure_model``."""

from __future__ import annotations

import gc
import resource
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from helpers.training import Result, Training, make_trainer, quiet, real_tensors, train
from lightning_gpp.common import mapped_tensor


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
    """432 MiB of weights.

    Tensors of more than 32 MiB are given back to the system as soon as they are freed.
    """

    num_layers, width = 12, 3072

    def configure_model(self) -> None:
        layers = [nn.Linear(self.width, self.width, bias=False) for _ in range(self.num_layers)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=10.0)


class _SmallModel(LargeModel):
    width = 8


def _fit(model: LargeModel, num_ranks: int, *callbacks: lp.Callback) -> None:
    """Trains for two steps: with plain Lightning, or with as many layers on every rank."""
    per_stage = model.num_layers // num_ranks
    firsts = range(0, model.num_layers, per_stage)
    stages = [[f"layers.{i}" for i in range(first, first + per_stage)] for first in firsts]
    strategy = {"num_microbatches": 2, "plan": stages, "timeout": 100.0} if num_ranks > 1 else None
    data = DataLoader(TensorDataset(10 * torch.randn(8, model.width)), batch_size=4)
    with quiet():
        trainer = make_trainer(strategy, num_ranks, max_steps=2, callbacks=[*callbacks])
        trainer.fit(model, data)


@dataclass(frozen=True)
class Limited:
    """What a rank with little memory came to.

    Attributes:
        error: that memory ran out; None if it did not.
        changed_bytes: of the weights that this rank trained.
        disk_bytes: most that lay in files at once, of this rank.
    """

    error: str | None
    changed_bytes: int
    disk_bytes: int


def train_within(limit_bytes: int, num_ranks: int) -> Limited:
    """Trains the large model while this process may not get more memory than this.

    The limit is the system's own, on all private memory (``RLIMIT_DATA``): an allocation beyond it
    fails.
    """
    _fit(_SmallModel(), num_ranks)  # imports, and the stacks of threads
    noted, files = _Trained(), _Files()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    gc.collect()
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + limit_bytes, before[1]))
    try:
        with files:
            _fit(LargeModel(), num_ranks, noted)
    except (MemoryError, RuntimeError) as error:
        return Limited(str(error), noted.changed_bytes, files.most_bytes)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    return Limited(None, noted.changed_bytes, files.most_bytes)


class _Trained(lp.Callback):
    """Which of its weights a rank has trained."""

    changed_bytes = 0

    def on_train_batch_start(self, trainer: lp.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            self.before = {name: weight[0].clone() for name, weight in _held(pl_module)}

    def on_train_end(self, trainer: lp.Trainer, pl_module: lp.LightningModule) -> None:
        changed = [w for name, w in _held(pl_module) if not torch.equal(w[0], self.before[name])]
        self.changed_bytes = sum(weight.nbytes for weight in changed)


def _held(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Weights of this rank, not copied; ``named_parameters`` would make the module whole."""
    return [
        (f"{path}.{name}", parameter.detach())
        for path, part in module.named_modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and not parameter.is_meta
    ]


class _Files:
    """Counts what lies in files while this is entered."""

    def __enter__(self) -> None:
        self.now_bytes = self.most_bytes = 0
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(torch, "from_file", partial(self._make, torch.from_file))

    def __exit__(self, *_: object) -> None:
        self.patch.undo()

    def _make(self, make: Any, path: str, *, size: int, **options: Any) -> Tensor:
        self.now_bytes += size
        self.most_bytes = max(self.most_bytes, self.now_bytes)
        tensor = make(path, size=size, **options)
        weakref.finalize(tensor.untyped_storage(), self._forget, size)
        return tensor

    def _forget(self, size: int) -> None:
        self.now_bytes -= size


def _data_bytes() -> int:
    """Private memory that this process has asked for, as Linux counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmData"))
    return int(line.split()[1]) * 1024
