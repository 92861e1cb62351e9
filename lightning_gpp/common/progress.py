"""Says what is going on where a person waits: a line when it has taken two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.std import tqdm

from lightning_gpp.common.units_of_measure import seconds_text

PATIENCE_S = 2.0
"""Seconds that nobody wonders about."""


class _PassingLine(tqdm):  # type: ignore[misc]
    """A line below other bars that goes when it is closed."""

    monitor_interval = 0  # no thread that watches it


@contextmanager
def doing(what: str, show: Callable[[str], None], *, may_pass: bool = True) -> Iterator[None]:
    """What the body does is shown if it takes longer than :data:`PATIENCE_S`.

    On a terminal a line stands there meanwhile (``Measuring the model ...``) and makes way for the
    one that says how long it took; elsewhere both are ordinary lines. They belong to the standard
    error output, as progress bars do: what a command answers stands alone on the other one. A body
    that raises gets no second line. No thread is left behind.

    Args:
        what: the first words of the line, such as ``Measuring the model``.
        show: prints a line.
        may_pass: whether a line may stand on a terminal for a while, as progress bars do.
    """
    passing: list[_PassingLine] = []

    def tell() -> None:
        if may_pass and sys.stderr.isatty():
            line = _PassingLine(bar_format=f"{what} ...", leave=False, file=sys.stderr, total=0)
            passing.append(line)
        else:
            show(f"{what} ...")

    start_s = time.monotonic()
    waiting = threading.Timer(PATIENCE_S, tell)
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()
        waiting.join()
        for line in passing:
            line.close()
    took_s = time.monotonic() - start_s
    if took_s >= PATIENCE_S:
        show(f"{what} took {seconds_text(took_s)}.")
