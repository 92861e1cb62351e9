"""How often the host waited for a device, by cause and by line of Python."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from standin_gpus.library import LIBRARY

_SIZE = 1 << 16
_HOOK = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
_NO_HOOK = ctypes.cast(None, _HOOK)

OF_THE_STAND_IN = "(stand-in)"
"""Cause of waits that a GPU has not: for operators whose output shapes torch cannot infer."""


@dataclass(frozen=True)
class Site:
    """Where the host waited.

    Attributes:
        cause: what it waited for.
        operator: the operator, where one was called.
        thread: of Python.
        lines: the innermost line, and those of the package below it.
    """

    cause: str
    operator: str
    thread: str
    lines: str


def counts(*, reset: bool = True) -> dict[str, int]:
    """Waits by cause since the last reset, the stand-in's own left out."""
    data = ctypes.create_string_buffer(_SIZE)
    LIBRARY.standin_wait_counts(data, _SIZE, int(reset))
    rows = (line.split("\t") for line in data.value.decode().splitlines())
    return {cause: int(number) for cause, number in rows if cause != OF_THE_STAND_IN}


@contextmanager
def sites(package: str = "lightning_gpp", depth: int = 4) -> Iterator[Counter[Site]]:
    """Counts waits by line meanwhile, which takes time at each of them."""
    found: Counter[Site] = Counter()

    def note(cause: bytes, operator: bytes) -> None:
        lines = " < ".join(_lines(sys._getframe(1), package, depth))
        thread = threading.current_thread().name
        found[Site(cause.decode(), operator.decode(), thread, lines)] += 1

    hook = _HOOK(note)
    LIBRARY.standin_set_wait_hook(hook)
    try:
        yield found
    finally:
        LIBRARY.standin_set_wait_hook(_NO_HOOK)


def _lines(frame: FrameType | None, package: str, depth: int) -> list[str]:
    lines: list[str] = []
    while frame is not None and len(lines) < depth:
        name = frame.f_code.co_filename
        if package in name or not lines:
            short = name[name.find(package) :] if package in name else name
            lines.append(f"{short}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return lines
