"""Fits that look at how a plan came about."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning.pytorch as pl
from torch import Tensor

from helpers.jobs import plan_of_fit
from helpers.models import DataSpec
from helpers.modules import ChainModel
from helpers.training import make_trainer, quiet
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.reports.plan.verdict import BatchTimes
from lightning_gpp.strategy import report
from lightning_gpp.strategy.planning import plan_cache


def plan_and_messages(strategy: dict[str, Any], num_ranks: int) -> tuple[Plan, list[str]]:
    """The plan of a short fit, and what the cache had to say."""
    with messages_of("lightning_gpp.strategy.planning.profile_cache") as messages:
        plan, _ = plan_of_fit(strategy, num_ranks)
    return plan, messages


def plan_without_search(strategy: dict[str, Any], num_ranks: int) -> tuple[Plan, list[str]]:
    """The same, where no planner may be asked."""
    fault = AssertionError("a planner was asked")
    with mock.patch.object(plan_cache, "answer", side_effect=fault):
        return plan_and_messages(strategy, num_ranks)


@contextmanager
def messages_of(name: str) -> Iterator[list[str]]:
    """The texts that a logger is given."""
    logger, texts = logging.getLogger(name), []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler, level = Keep(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


STEP_S, LAYER_S = 0.03, 0.01
"""Seconds that the step of a :class:`Sleeping` sleeps, and its first layer."""


class Sleeping(ChainModel):
    """Sleeps in its step, and in a layer of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.layers[0].register_forward_hook(lambda *_: time.sleep(LAYER_S))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(STEP_S / 2)
        loss = super().training_step(batch, batch_idx)
        time.sleep(STEP_S / 2)
        return loss


class _Times(pl.Callback):
    found: tuple[bool, BatchTimes | None] | None = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        planned = strategy.session.run.built.planned
        if planned is not None:
            self.found = planned.request.is_estimated, strategy.reports.batch_times


WAITS = ("Starting", "Capturing", "Measuring the", "Planning", "Giving", "Trying")
"""Beginnings of lines about what takes more than two seconds, as everything does under load."""


def said_in_fit(
    strategy: dict[str, Any], num_steps: int, num_ranks: int
) -> tuple[list[str], tuple[bool, BatchTimes | None] | None]:
    """What is printed in a fit; on rank 0 whether costs were estimated, and what batches took."""
    said: list[str] = []

    def show(text: str) -> None:
        if not text.startswith(WAITS):
            said.append(text)

    with quiet(), mock.patch.object(report, "show", show):
        trainer = make_trainer({"timeout": 100.0} | strategy, num_ranks, max_steps=num_steps)
        trainer.callbacks.append(times := _Times())
        trainer.fit(Sleeping(), DataSpec(num_samples=8 * 20).loader())
    return said, times.found
