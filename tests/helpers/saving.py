"""Ranks that save checkpoints in folders, in the background, or end while they do."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import pytest
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor

from helpers.models import DataSpec, ExportableModel
from helpers.training import Training, make_trainer, quiet, real_tensors
from lightning_gpp.strategy.state import sharded_checkpoint
from lightning_gpp.strategy.state.sharded_checkpoint import ReplacingCheckpointIO

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


class _SavesInBackground(_Saves):
    """Lets the second checkpoint be completed two steps after it has begun."""

    def __init__(self, folder: Path) -> None:
        super().__init__({4: str(folder / "first"), 8: str(folder / "second")})
        self.folder = folder
        self.goes_on = threading.Event()
        self.meanwhile: list[str] = []

    def on_train_batch_end(
        self, trainer: lp.Trainer, pl_module: lp.LightningModule, *args: Any
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        if trainer.global_step == 8:
            trainer.strategy.remove_checkpoint(self.saved[0])
        if trainer.global_step == 10:
            self.meanwhile = visible(self.folder)
            self.goes_on.set()


def _fit(
    callback: lp.Callback, num_ranks: int, strategy: dict[str, Any] = SHARDED, **options: Any
) -> None:
    training = Training(partial(ExportableModel, hidden=5), DataSpec(num_inputs=2))
    with quiet():
        trainer = make_trainer(strategy, num_ranks, max_steps=12, callbacks=[callback], **options)
        trainer.fit(training.module(), training.data.loader())


def visible(folder: Path) -> list[str]:
    """What is in a folder under a name of its own."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def save_in_background(
    folder: str, form: str, num_pipelines: int, num_ranks: int
) -> tuple[list[str], dict[str, Tensor]]:
    """Saves twice in the background, and removes the first once the second has begun.

    Returns:
        What is in the folder while the second is not complete; this rank's weights at its moment.
    """
    callback = _SavesInBackground(Path(folder))
    kind: Any = sharded_checkpoint._FolderWriter if form == "sharded" else ReplacingCheckpointIO
    name = "finish" if form == "sharded" else "save_checkpoint"
    finish = getattr(kind, name)

    def late(writer: Any, *args: Any, **results: Any) -> None:
        path = writer._target if form == "sharded" else Path(args[1])
        assert path.name == "first" or callback.goes_on.wait(30.0)
        finish(writer, *args, **results)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, name, late)
        strategy = SHARDED | {"state_dict_type": form, "pipelines": num_pipelines}
        _fit(callback, num_ranks, strategy, plugins=[AsyncCheckpointIO()])
    return callback.meanwhile, callback.weights


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
