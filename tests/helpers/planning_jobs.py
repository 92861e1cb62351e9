"""Fits that look at how a plan came about."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from helpers.jobs import plan_of_fit
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.strategy.planning import timed_costs


def plan_and_messages(strategy: dict[str, Any], num_ranks: int) -> tuple[Plan, list[str]]:
    """The plan of a short fit on an idle machine, and what the cache of plans had to say."""
    with (
        mock.patch.object(timed_costs, "BUSY", math.inf),
        messages_of("lightning_gpp.strategy.planning.plan_cache") as messages,
    ):
        plan, _ = plan_of_fit(strategy, num_ranks)
    return plan, messages


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
