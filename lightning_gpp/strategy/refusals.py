"""What the strategy does not take, said before anything runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    ModelPruning,
)

from lightning_gpp.schedule import ONE_F_ONE_B_ASYNC


def check_name(what: str, name: str, known: Collection[str]) -> None:
    """Raises ValueError, naming the known ones, when there is none of this name."""
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; known {what}s: {', '.join(known)}")


def compile_options(given: bool | Mapping[str, Any], schedule: str | None) -> dict[str, Any] | None:
    """Options of ``torch.compile`` for stages; None where they are not compiled.

    Raises:
        ValueError: an option that stages decide, or a schedule that exchanges their weights.
    """
    if given is False:
        return None
    if schedule == ONE_F_ONE_B_ASYNC.name:
        raise ValueError(
            f"compile={given!r}: the stages of schedule={schedule!r} run with other tensors in the "
            "place of their weights every time, which would be compiled anew; use another schedule"
        )
    options = {} if given is True else dict(given)
    if "fullgraph" in options:
        raise ValueError("compile: every stage is one graph; leave 'fullgraph' out")
    return options


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
