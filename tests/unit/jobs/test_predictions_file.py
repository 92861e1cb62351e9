"""The file of what is predicted."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_gpp import GraphPipeStrategy
from lightning_gpp.jobs.evaluate import PredictionsFile


def test_parts_of_the_data_are_refused(tmp_path: Path) -> None:
    strategy = GraphPipeStrategy(pipelines=2)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
    with pytest.raises(
        ValueError, match=r"2 ranks would each predict a part.*strategy\.pipelines=1"
    ):
        PredictionsFile(tmp_path / "predictions.pt").on_predict_start(trainer, BoringModel())
