"""Gradients of the step before, let go before a step that makes new ones.

Lightning clears gradients between a training step and its backward. Where the step itself runs
forwards and backwards, the old gradients would lie beside the new ones until it is over: once more
the memory of the weights. So they are cleared before, unless somebody may look at them in between.
"""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_gpp.strategy.lightning_private import is_overridden


def clear_old_gradients(trainer: pl.Trainer) -> None:
    """Clears gradients where Lightning is about to do the same and nobody would notice."""
    is_first = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
    if is_first and not _is_watched(trainer):
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()


def _is_watched(trainer: pl.Trainer) -> bool:
    """Whether a hook is called between the step and the backward, or clears in its own way."""
    module, hook = trainer.lightning_module, "on_before_zero_grad"
    return (
        is_overridden("optimizer_zero_grad", module)
        or is_overridden(hook, module)
        or any(is_overridden(hook, callback, pl.Callback) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    )
