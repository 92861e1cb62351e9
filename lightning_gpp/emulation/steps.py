"""Training steps in emulated time: when they begin on all ranks, and what each took.

Every step begins at one emulated moment on all ranks. Between its forward and its backward part the
user's step runs, and emulated time stands still.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning_gpp.emulation.clock import EmulatedCursor
from lightning_gpp.emulation.report import EmulatedStep

START_S = 5e-3
"""Real seconds from rank 0's word to the beginning of a step, for all ranks to hear it ..."""

START_RANK_S = 1e-3
"""... and more for each rank, as they share this machine's cores."""


class EmulatedSteps:
    """The steps of one rank.

    Args:
        cursor: of this rank.
        control: what the ranks say to each other
            (:class:`~lightning_gpp.strategy.ranks.control.Control`).

    Attributes:
        cursor: likewise.
        steps: what this rank did so far, training step by training step.
    """

    def __init__(self, cursor: EmulatedCursor, control: Any) -> None:
        self.cursor, self._control = cursor, control
        self.steps: list[EmulatedStep] = []

    @contextlib.contextmanager
    def part(self, num_microbatches: int, *, is_second: bool) -> Iterator[int]:
        """All ranks: the body runs a step, or one of its parts, at the emulated devices' pace.

        It gets for how many real nanoseconds emulated time stood still before it.

        Args:
            num_microbatches: of the mini-batch.
            is_second: whether it is the backward part.
        """
        cursor, still_s = self.cursor, 0.0
        if is_second:
            before = self.steps.pop()
            start_s, first_end_s = self._agree_on_second()
            cursor.take_slips()
            cursor.wait_until(start_s + max(0.0, cursor.cursor_s - first_end_s))
            still_s = start_s - first_end_s
        else:
            start_s = self.begin()
            before = EmulatedStep(start_s, start_s, num_microbatches)
        yield round(still_s * cursor.clock.time_scale * 1e9)
        end_s, slips = cursor.cursor_s - still_s, before.slips + cursor.take_slips().slips
        self.steps.append(EmulatedStep(before.start_s, end_s, num_microbatches, slips))

    def begin(self) -> float:
        """All ranks: waits for the moment at which a step begins, once all have ended theirs."""
        with self._control.together():
            start_s: float = self._control.combined(
                self.cursor.cursor_s,
                lambda ends_s: max(self.next_start_s(), *ends_s),
                "waiting for all ranks to end a step",
            )
        self.cursor.take_slips()
        self.cursor.wait_until(start_s)
        return start_s

    def _agree_on_second(self) -> tuple[float, float]:
        """All ranks: when rank 0 begins the second part, and when it ended the first."""
        with self._control.together():
            found: tuple[float, float] = self._control.share(
                (self.next_start_s(), self.cursor.cursor_s),
                "waiting for rank 0 to go on with a step",
            )
        return found

    def next_start_s(self) -> float:
        """Rank 0: the moment by which all ranks have heard of it."""
        clock = self.cursor.clock
        real_s: float = START_S + START_RANK_S * self._control.num_ranks
        return clock.now_s() + real_s / clock.time_scale

    def gathered(self) -> list[list[EmulatedStep]]:
        """All ranks: on rank 0 the steps of every rank; nothing elsewhere."""
        found: list[list[EmulatedStep]] = self._control.gather(
            self.steps, "gathering what the emulated steps took"
        )
        return found
