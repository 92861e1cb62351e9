"""What rank 0 says stands above bars: of Rich's display only what goes through it does."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from rich.console import Console
from rich.live import Live

from lightning_gpp.strategy.between_bars import between_bars


def test_handlers_made_before_a_display_of_rich_write_through_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    logger = logging.getLogger("tests.between_bars")
    logger.propagate, handler = False, logging.StreamHandler(screen)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        console = Console(file=screen, force_terminal=True, width=40)
        with Live("a bar", console=console, auto_refresh=False):
            before = screen.tell()
            with between_bars(logger.name):
                logger.info("a verdict")
            said = screen.getvalue()[before:]
        assert "\x1b[2K" in said.partition("a verdict")[0]  # the line of the bar is taken away
        assert said.rstrip().endswith("a bar")  # and comes back below
        assert handler.stream is screen
        with between_bars(logger.name):
            logger.info("no bar")
        assert screen.getvalue().endswith("no bar\n")
    finally:
        logger.removeHandler(handler)
