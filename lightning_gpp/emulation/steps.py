"""Training steps in emulated time: when they begin on all ranks, and what each took.

Every step begins at one emulated moment on all ranks. Between its forward and its backward part the
user's step runs, and emulated time stands still.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_gpp.emulation.clock import EmulatedCursor
from lightning_gpp.emulation.report import EmulatedStep

START_S = 5e-3
"""Real seconds from rank 0's word to the beginning of a step, for all ranks to hear it ..."""

START_RANK_S = 1e-3
"""... and more for each rank, as they share this machine's cores."""


class RanksTogether(Protocol):
    """What the ranks of an emulation say to each other."""

    rank: int
    num_ranks: int
    is_leader: bool

    def together(self) -> AbstractContextManager[None]:
        """All ranks: they do the same in the body."""

    def share(self, obj: Any, purpose: str) -> Any:
        """All ranks: rank 0's object."""

    def gather(self, obj: Any, purpose: str) -> list[Any]:
        """All ranks: on rank 0 the objects of all; nothing elsewhere."""


@dataclass
class EmulatedSteps:
    """The steps of one rank.

    Attributes:
        cursor: of this rank.
        control: between the ranks.
        steps: what this rank did so far, training step by training step.
    """

    cursor: EmulatedCursor
    control: RanksTogether
    steps: list[EmulatedStep] = field(default_factory=list)

    @contextlib.contextmanager
    def part(self, num_microbatches: int, *, is_second: bool) -> Iterator[int]:
        """All ranks: the body runs a step, or one of its parts, at the emulated devices' pace.

        It gets for how many real nanoseconds emulated time stood still before it.

        Args:
            num_microbatches: of the mini-batch.
            is_second: whether it is the backward part.
        """
        cursor = self.cursor
        if is_second:
            start_s, first_end_s = self._agree_on_second()
            cursor.take_slips()
            cursor.wait_until(start_s + max(0.0, cursor.cursor_s - first_end_s))
            still_s = (start_s - first_end_s) * cursor.clock.time_scale
        else:
            still_s, start_s = 0.0, self.begin()
        yield round(still_s * 1e9)
        slips = cursor.take_slips().slips
        done = EmulatedStep(start_s, cursor.cursor_s, num_microbatches, slips)
        if is_second:
            first, taken_s = self.steps.pop(), cursor.cursor_s - start_s
            end_s, slips = first_end_s + taken_s, first.slips + slips
            done = EmulatedStep(first.start_s, end_s, num_microbatches, slips)
        self.steps.append(done)

    def begin(self) -> float:
        """All ranks: waits for the moment at which a step begins, once all have ended theirs."""
        control, cursor = self.control, self.cursor
        with control.together():
            ends_s = control.gather(cursor.cursor_s, "waiting for all ranks to end a step")
            agreed_s = max(self.next_start_s(), *ends_s) if ends_s else None
            start_s: float = control.share(agreed_s, "waiting for rank 0 to begin a step")
        cursor.take_slips()
        cursor.wait_until(start_s)
        return start_s

    def _agree_on_second(self) -> tuple[float, float]:
        """All ranks: when rank 0 begins the second part, and when it ended the first."""
        moments = (self.next_start_s(), self.cursor.cursor_s) if self.control.is_leader else None
        with self.control.together():
            found: tuple[float, float] = self.control.share(
                moments, "waiting for rank 0 to go on with a step"
            )
        return found

    def next_start_s(self) -> float:
        """Rank 0: the moment by which all ranks have heard of it."""
        real_s = START_S + START_RANK_S * self.control.num_ranks
        return self.cursor.clock.now_s() + real_s / self.cursor.clock.time_scale

    def gathered(self) -> list[list[EmulatedStep]]:
        """All ranks: on rank 0 the steps of every rank; nothing elsewhere."""
        return self.control.gather(self.steps, "gathering what the emulated steps took")
