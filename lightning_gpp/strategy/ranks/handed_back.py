"""What rank 0 of a run hands back to the Trainer of the process that started it.

Lightning's launchers of processes hand back weights, ``callback_metrics`` and the path of the best
checkpoint. With this the starter's Trainer also knows how far training came and what it logged and
kept, as after a run that the script itself was a rank of.
"""

from __future__ import annotations

import io
from operator import attrgetter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils import _pytree as pytree

LOOP_STATE = "state_dict"
"""Last part of the keys under which a loop keeps what is no progress."""

KEPT_CHECKPOINTS = (
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "dirpath",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
)
"""Attributes of a ``ModelCheckpoint`` that say what it has kept."""


def handed_back(trainer: pl.Trainer) -> bytes:
    """Steps and epochs done, logged metrics and kept checkpoints of a Trainer that has run."""
    state = trainer.fit_loop.state_dict()
    progress = {key: value for key, value in state.items() if not key.endswith(LOOP_STATE)}
    found = {
        "progress": progress,
        "epoch_loop": state[f"epoch_loop.{LOOP_STATE}"],
        "logged_metrics": on_cpu(trainer.logged_metrics),
        "checkpoints": [
            on_cpu({name: getattr(callback, name) for name in KEPT_CHECKPOINTS})
            for callback in _checkpoint_callbacks(trainer)
        ],
    }
    buffer = io.BytesIO()
    torch.save(found, buffer)
    return buffer.getvalue()


def take_back(trainer: pl.Trainer, data: bytes) -> None:
    """Gives a Trainer what :func:`handed_back` made of the same one in another process."""
    found = torch.load(io.BytesIO(data), weights_only=False)
    for key, value in found["progress"].items():
        attrgetter(key)(trainer.fit_loop).load_state_dict(value)
    trainer.fit_loop.epoch_loop.on_load_checkpoint(found["epoch_loop"])
    trainer.logged_metrics.update(found["logged_metrics"])
    for callback, kept in zip(_checkpoint_callbacks(trainer), found["checkpoints"]):
        for name, value in kept.items():
            setattr(callback, name, value)


def on_cpu(values: dict[str, Any]) -> dict[str, Any]:
    """Values, tensors among them and in their dicts on the CPU."""
    moved: dict[str, Any] = pytree.tree_map_only(Tensor, Tensor.cpu, values)
    return moved


def _checkpoint_callbacks(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
