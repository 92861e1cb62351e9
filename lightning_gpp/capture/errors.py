"""Errors of capture, and the line of the user's code where they occur."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch

_OWN = Path(__file__).parent
_FOREIGN = (str(Path(torch.__file__).parent), str(_OWN), str(_OWN.parent / "common"), "<")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")

REMEDY = (
    "move this line into a sub-module and name it in leaf_modules=[...], or describe the forward "
    "by hand (blocks=BlockGraph(...))"
)
"""What a user can always do."""


class CaptureError(ValueError):
    """The model cannot be captured; the message names the line and the remedy."""


class GuardError(CaptureError):
    """A decision that was fixed at capture has another outcome now.

    Attributes:
        location: ``file:line`` of the decision.
        scope: the module that takes it.
    """

    def __init__(self, message: str, location: str = "", scope: str = "") -> None:
        super().__init__(message)
        self.location, self.scope = location, scope


def _is_foreign(filename: str) -> bool:
    """Whether a file of Python code is torch's, Python's or ours, and not the user's."""
    if filename.startswith(_FOREIGN):
        return True
    return filename.startswith(_STANDARD_LIBRARY) and "-packages" not in filename


def user_location() -> str:
    """``file:line`` of the innermost running line that is the user's."""
    return _first_of_user(traceback.walk_stack(sys._getframe(1)))


def raised_location(error: BaseException) -> str:
    """``file:line`` of the innermost line of the user that took part in raising ``error``."""
    return _first_of_user(reversed(list(traceback.walk_tb(error.__traceback__))))


def _first_of_user(frames: Iterable[tuple[FrameType, int]]) -> str:
    for frame, line in frames:
        if not _is_foreign(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{line}"
    return "unknown line"


def describe(error: BaseException) -> str:
    """One line for an error, without the general remedy: kind, message, where it was raised."""
    if isinstance(error, CaptureError):
        return str(error).removesuffix(REMEDY).removesuffix(": ").removesuffix(", or ")
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text} (at {raised_location(error)})"
