"""Fixtures for the command line."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

LOGGERS = (
    None,
    "lightning",
    "lightning.pytorch",
    "lightning.fabric.utilities.distributed",
    "lightning.fabric.utilities.rank_zero",
    "lightning.pytorch.utilities.rank_zero",
    "torch.multiprocessing.spawn",
)


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Undoes what Hydra and the command line do to the loggers."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(log.level, log.handlers[:], log.filters[:], log.propagate) for log in loggers]
    yield
    for log, (level, handlers, filters, propagate) in zip(loggers, before):
        for handler in set(log.handlers) - set(handlers):
            handler.close()
        log.setLevel(level)
        log.handlers[:], log.filters[:], log.propagate = handlers, filters, propagate
