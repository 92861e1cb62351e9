"""How fast a device goes through a program: as fast as it can, unless it has a pace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class ProgramPace(Protocol):
    """Is told what a device does in a program, in order; may let time pass."""

    def passed(self, instruction: int, *, is_backward: bool) -> None:
        """The forward or the backward of an instruction is over."""

    def begin_sum(self, size_bytes: int) -> Callable[[], None]:
        """A bucket of gradients is full; what is returned is called where its sum is needed."""

    def end_half(self, *, is_backward: bool) -> None:
        """The forward, or the backward, of the whole program is over."""
