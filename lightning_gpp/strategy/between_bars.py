"""Prints between progress bars instead of into them: tqdm's and Rich's."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tqdm.auto import tqdm

RANK_ZERO = "lightning.pytorch.utilities.rank_zero"
"""The logger by which rank 0 speaks."""


@contextmanager
def between_bars(name: str = RANK_ZERO) -> Iterator[None]:
    """Bars make way for what a logger is told in the body.

    A display of Rich stands in front of ``sys.stdout`` and ``sys.stderr``. Handlers that were made
    before it began write behind its back, onto the line of a bar, so they write to it meanwhile.
    """
    displays: dict[int, Any] = {
        id(shown.rich_proxied_file): shown
        for shown in (sys.stdout, sys.stderr)
        if hasattr(shown, "rich_proxied_file")
    }
    with ExitStack() as stack:
        stack.enter_context(tqdm.external_write_mode())
        for handler in _stream_handlers(name):
            if id(handler.stream) in displays:
                before = handler.setStream(displays[id(handler.stream)])
                stack.callback(handler.setStream, before)
        yield


def _stream_handlers(name: str) -> Iterator[logging.StreamHandler[Any]]:
    """Those that a logger's messages reach."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler):
                yield handler
        logger = logger.parent if logger.propagate else None
