"""Fixtures for the command line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator

import pytest

from lightning_gpp import cli

Run = Callable[..., str]

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


@pytest.fixture
def graphpipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process; gives back what it prints."""
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*overrides: str) -> str:
        monkeypatch.setattr(sys, "argv", ["graphpipe", *overrides])
        cli.main()
        return capsys.readouterr().out

    return run
