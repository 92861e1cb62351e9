"""The multimodal recipe in plain Lightning, on one device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from helpers.training import make_trainer
from lightning.pytorch import seed_everything

from lightning_gpp.recipes.multimodal import (
    Digits,
    MultimodalClassifier,
    MultipleFeatures,
    MultiViewData,
)

DATA_ROOT = os.environ.get("LIGHTNING_GPP_DATA")


def trained_accuracy(data: MultiViewData, folder: Path, *, max_epochs: int) -> float:
    seed_everything(0, verbose=False)
    trainer = make_trainer(None, max_epochs=max_epochs, default_root_dir=folder)
    trainer.fit(MultimodalClassifier.for_data(data), datamodule=data)
    return float(trainer.callback_metrics["val_acc"])


def test_learns_the_shipped_digits(run_folder: Path) -> None:
    assert trained_accuracy(Digits(), run_folder, max_epochs=4) > 0.96


@pytest.mark.skipif(DATA_ROOT is None, reason="LIGHTNING_GPP_DATA is not set")
def test_learns_the_real_digits(run_folder: Path) -> None:
    assert trained_accuracy(MultipleFeatures(str(DATA_ROOT)), run_folder, max_epochs=10) >= 0.975


def test_a_sample_does_not_depend_on_its_batch() -> None:
    seed_everything(0, verbose=False)
    model = MultimodalClassifier({"a": 5, "b": 3}, num_classes=4, dropout=0.0).double()
    views = {
        "a": torch.randn(6, 5, dtype=torch.double),
        "b": torch.randn(6, 3, dtype=torch.double),
    }
    whole = model(views)
    parts = [model({name: view[i : i + 2] for name, view in views.items()}) for i in (0, 2, 4)]
    assert torch.allclose(torch.cat(parts), whole, rtol=0, atol=1e-12)
