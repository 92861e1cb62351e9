"""A callback that times training steps."""

from __future__ import annotations

import statistics
import time

from lightning.pytorch import Callback, LightningModule, Trainer

SECONDS = "seconds_per_step"
"""The metric that it logs."""


class StepWatch(Callback):
    """Logs the median time from the end of one training step to the end of the next, per epoch.

    Evaluation between steps does not count.

    At the end of every epoch, of that epoch; evaluation in between does not count.
    """

    def __init__(self) -> None:
        self._gaps_s: list[float] = []
        self._last_s: float | None = None

    def on_train_batch_end(self, *args: object) -> None:
        """A step is over."""
        now_s = time.perf_counter()
        if self._last_s is not None:
            self._gaps_s.append(now_s - self._last_s)
        self._last_s = now_s

    def on_validation_start(self, *args: object) -> None:
        """Validation does not count."""
        self._last_s = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs what the epoch's steps took."""
        if self._gaps_s:
            pl_module.log(SECONDS, statistics.median(self._gaps_s))
        self._gaps_s, self._last_s = [], None
