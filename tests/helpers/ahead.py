"""Trainings whose inputs go to other ranks a step early."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from torch import Tensor

from helpers.models import ExportableModel
from helpers.training import Result, Training, train
from lightning_gpp.strategy.step import loaders
from lightning_gpp.strategy.step.inputs_ahead import InputsAhead


class Uncounted(ExportableModel):
    """Changes an input in every step from one on, in a way that nobody counts."""

    first = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step >= self.first:
            batch[0][1].data.neg_()
        return super().training_step(batch, batch_idx)


class UncountedLate(Uncounted):
    """Begins to do so once comparisons are no longer waited for."""

    first = 9


def train_ahead(
    training: Training, strategy: dict[str, Any], num_ranks: int
) -> tuple[Result, list[bool | None]]:
    """Trains; whether the inputs of each step had come before it, None where nothing had.

    The loader reads in this process, and the devices may be CPUs, where otherwise nothing is read
    ahead: workers take seconds to start.
    """
    come, guesses = InputsAhead.come, list[bool | None]()

    def noted(self: InputsAhead, *args: Any) -> Any:
        is_first = self._batch is not None
        sent = come(self, *args)
        if is_first:
            guesses.append(None if sent is None else sent.is_right)
        return sent

    can_look = patch.object(loaders, "can_look_ahead", lambda loader, run: not run.is_alone)
    has_next = patch.object(loaders.LeadingBatches, "has_next", True)
    with can_look, has_next, patch.object(InputsAhead, "come", noted):
        return train(training, {"timeout": 100, **strategy}, num_ranks), guesses
