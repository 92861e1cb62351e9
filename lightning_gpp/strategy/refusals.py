"""What the strategy does not take, said before anything runs."""

from __future__ import annotations

from collections.abc import Collection

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    ModelPruning,
)


def check_name(what: str, name: str, known: Collection[str]) -> None:
    """Raises ValueError, naming the known ones, when there is none of this name."""
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; known {what}s: {', '.join(known)}")


_REFUSED_CALLBACKS: dict[type[pl.Callback], str] = {
    ModelPruning: "replaces parameters of the whole model on every rank, but a rank holds only "
    "those of its stages; prune the trained module on one device after the fit (torch.nn.utils."
    "prune)",
    BatchSizeFinder: "tries sizes until memory runs out, which would end one rank and with it the "
    "run; choose the batch size by hand and find out with a short fit (max_steps=3)",
}


def refuse_callbacks(trainer: pl.Trainer, num_ranks: int) -> None:
    """Raises NotImplementedError, with the remedy, for callbacks that cannot work on stages.

    Args:
        trainer: whose callbacks.
        num_ranks: of the pipeline. One rank holds all weights, so that there only what replaces
            parameters is refused.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, why in _REFUSED_CALLBACKS.items():
            if isinstance(callback, kind) and (num_ranks > 1 or kind is ModelPruning):
                name = type(callback).__name__
                raise NotImplementedError(
                    f"{name} does not work with the graphpipe strategy: it {why}"
                )
