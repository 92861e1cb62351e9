"""What our accelerators have in common."""

from __future__ import annotations

import lightning.pytorch as pl


class OurStrategy:
    """A strategy that trains on our accelerators."""


def refuse_other_strategies(trainer: pl.Trainer, accelerator: str) -> None:
    """Raises TypeError, with the remedy, where an accelerator of ours meets a foreign strategy."""
    if not isinstance(trainer.strategy, OurStrategy):
        raise TypeError(
            f'accelerator="{accelerator}" works with the graphpipe strategies only, not with '
            f'{type(trainer.strategy).__name__}: use Trainer(strategy="graphpipe"), or another '
            "accelerator"
        )
