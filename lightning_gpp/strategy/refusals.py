"""What the strategy does not take, said before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging


def check_name(what: str, name: str, known: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the known ones, when there is none of this name."""
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; known {what}s: {', '.join(known)}")


def refuse_manual_optimization(module: pl.LightningModule) -> None:
    """Raises NotImplementedError for a module that optimizes by hand."""
    if not module.automatic_optimization:
        raise NotImplementedError(
            "manual optimization does not work with the graphpipe strategy yet; let "
            "training_step return the loss (automatic_optimization = True)"
        )


def refuse_averaging(trainer: pl.Trainer) -> None:
    """Raises NotImplementedError for callbacks that average the weights of the whole model."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise NotImplementedError(
                f"{type(callback).__name__} averages all weights on every rank, but a rank holds "
                "only those of its stages; the graphpipe strategy does not support it yet"
            )
