"""A callback that writes what is predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer


class PredictionsFile(Callback):
    """The first rank writes a list with what ``predict_step`` returned, batch by batch.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._predictions: list[Any] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses data of which the first rank predicts a part.

        Raises:
            ValueError: the text says what to choose.
        """
        readers = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        if readers > 1:
            raise ValueError(
                f"{readers} ranks would predict a part of the data each, and the file of "
                "predictions is that of the first one; choose strategy.pipelines=1, or "
                "strategy=single_device"
            )

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keeps what a batch gave."""
        if trainer.is_global_zero:
            self._predictions.append(move_data_to_device(outputs, torch.device("cpu")))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the file."""
        if trainer.is_global_zero:
            torch.save(self._predictions, self._path)
