"""Training of modules that are made in ``configure_model``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as lp
import pytest
import torch

from helpers.training import Result, Training, real_tensors, train
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
        training = replace(training, callbacks=lambda: [_First()])
        return train(training, strategy, num_ranks)
