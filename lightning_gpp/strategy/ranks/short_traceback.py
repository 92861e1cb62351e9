"""Removes frames that tell a user nothing from tracebacks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import lightning
import torch

SHOWS_ALL = "LIGHTNING_GPP_TRACEBACK"
"""Environment variable; ``full`` leaves tracebacks as they are."""

_LIGHTNING = tuple(
    str(Path(lightning.__file__).parent.with_name(name)) + os.sep
    for name in ("lightning", "lightning_fabric", "pytorch_lightning")
)
_OURS = str(Path(__file__).parents[2]) + os.sep
_INNER = (*_LIGHTNING, str(Path(torch.__file__).parent) + os.sep, _OURS, contextlib.__file__)


def shortened(trace: TracebackType | None) -> tuple[TracebackType | None, int]:
    """A traceback without frames that tell a user nothing, and how many these are.

    What is between the user's frames goes, and Lightning's loops. Of what follows the last of the
    user's frames only the end stays, where this package has called that frame (it looks into torch
    by ways of its own) or raises the error itself. Otherwise all of it leads to the error.
    """
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    files = [frame.tb_frame.f_code.co_filename for frame in frames]
    last_own = max((i for i, file in enumerate(files) if not file.startswith(_INNER)), default=-1)
    is_ours = any(file.startswith(_OURS) for file in [*files[: max(last_own, 0)], *files[-1:]])
    made, count = None, 0
    for i in reversed(range(len(frames))):
        hidden = _INNER if i < last_own or is_ours else _LIGHTNING
        if i < len(frames) - 1 and files[i].startswith(hidden):
            count += 1
        else:
            made = TracebackType(made, frames[i].tb_frame, frames[i].tb_lasti, frames[i].tb_lineno)
    return made, count


def shorten(error: BaseException) -> str:
    """Shortens the tracebacks of an error and its causes; returns what to say of that."""
    total = 0
    for each in _with_causes(error if os.environ.get(SHOWS_ALL) != "full" else None):
        each.__traceback__, count = shortened(each.__traceback__)
        total += count
    what = f"({total} frames of Lightning, torch and lightning_gpp are left out below; "
    return f"{what}{SHOWS_ALL}=full shows them)\n" if total else ""


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        hidden = None if error.__suppress_context__ else error.__context__
        error = error.__cause__ or hidden
