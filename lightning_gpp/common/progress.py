"""Announces work in a line once it has taken two seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_gpp.common.units_of_measure import seconds_text

PATIENCE_S = 2.0
"""Seconds that nobody wonders about."""


@contextmanager
def doing(what: str, show: Callable[[str], None]) -> Iterator[None]:
    """Announces the body if it takes longer than :data:`PATIENCE_S`, and how long it took.

    A body that raises gets no second line. No thread is left behind.

    Args:
        what: the first words of the lines, such as ``Measuring the model``.
        show: prints a line.
    """
    start_s = time.monotonic()
    waiting = threading.Timer(PATIENCE_S, show, (f"{what} ...",))
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()
        waiting.join()
    took_s = time.monotonic() - start_s
    if took_s >= PATIENCE_S:
        show(f"{what} took {seconds_text(took_s)}.")
