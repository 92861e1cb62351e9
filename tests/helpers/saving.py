"""Ranks that save checkpoints in folders, or end while they do."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import lightning.pytorch as lp
import pytest
from torch import Tensor

from helpers.models import DataSpec, ExportableModel
from helpers.training import Training, make_trainer, quiet, real_tensors
from lightning_gpp.strategy.state import sharded_checkpoint

SHARDED = {"num_microbatches": 2, "timeout": 100.0, "state_dict_type": "sharded"}


class _Saves(lp.Callback):
    """Saves after some steps, and keeps the weights of the moment that this rank has.

    Args:
        paths: where, by the number of steps.
    """

    def __init__(self, paths: dict[int, str]) -> None:
        self.paths = paths
        self.saved: list[str] = []
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_end(
        self, trainer: lp.Trainer, pl_module: lp.LightningModule, *_: Any
    ) -> None:
        path = self.paths.get(trainer.global_step)
        if path is not None:
            self.weights = real_tensors(pl_module)
            trainer.save_checkpoint(path)
            self.saved.append(path)


def _fit(
    callback: lp.Callback, num_ranks: int, strategy: dict[str, Any] = SHARDED, **options: Any
) -> None:
    training = Training(partial(ExportableModel, hidden=5), DataSpec(num_inputs=2))
    with quiet():
        trainer = make_trainer(strategy, num_ranks, max_steps=12, callbacks=[callback], **options)
        trainer.fit(training.module(), training.data.loader())


def end_while_saving(path: str, num_ranks: int) -> None:
    """Saves after four steps; the process of rank 1 ends while it saves after eight."""
    callback = _Saves({4: path, 8: path})
    write_data = sharded_checkpoint._FolderWriter.write_data

    def ending(writer: Any, plan: Any, planner: Any) -> Any:
        if callback.saved and os.environ["RANK"] == "1":
            os._exit(3)
        return write_data(writer, plan, planner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_checkpoint._FolderWriter, "write_data", ending)
        _fit(callback, num_ranks)
