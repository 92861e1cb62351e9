"""Training steps in emulated time: when they begin on all ranks, and what each took.

Every step begins at one emulated moment on all ranks. Between its forward and its backward part the
user's step runs, and emulated time stands still.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from lightning_gpp.runtime.emulation.cursor import EmulatedCursor
from lightning_gpp.strategy.emulation.emulation_report import EmulatedStep
from lightning_gpp.strategy.ranks.control import Control

START_S = 5e-3
"""Real seconds from rank 0's word to the beginning of a step, for all ranks to hear it ..."""

START_RANK_S = 1e-3
"""... and more for each rank, as they share this machine's cores."""


@dataclass
class EmulatedSteps:
    """The steps of one rank.

    Attributes:
        cursor: of this rank.
        control: between the ranks.
        steps: what this rank did so far, training step by training step.
    """

    cursor: EmulatedCursor
    control: Control
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
        start_s, first_end_s = self._agree_on_start()
        behind_s = max(0.0, cursor.cursor_s - first_end_s) if is_second else 0.0
        cursor.take_slips()
        cursor.wait_until(start_s + behind_s)
        still_s = (start_s - first_end_s) * cursor.clock.time_scale if is_second else 0.0
        yield round(still_s * 1e9)
        slips = cursor.take_slips().slips
        done = EmulatedStep(start_s, cursor.cursor_s, num_microbatches, slips)
        if is_second:
            first = self.steps.pop()
            done = first.followed_by(done, first_end_s)
        self.steps.append(done)

    def _agree_on_start(self) -> tuple[float, float]:
        """All ranks: the moment at which rank 0 says that it begins, and rank 0's cursor before."""
        if not self.control.is_leader:
            agreed: tuple[float, float] = self.control.hear("waiting for rank 0 to begin a step")
            return agreed
        agreed = self.next_start_s(), self.cursor.cursor_s
        self.control.tell(agreed)
        return agreed

    def next_start_s(self) -> float:
        """Rank 0: the moment by which all ranks have heard of it."""
        real_s = START_S + START_RANK_S * self.control.num_ranks
        return self.cursor.clock.now_s() + real_s / self.cursor.clock.time_scale

    def gathered(self) -> list[list[EmulatedStep]]:
        """All ranks: on rank 0 the steps of every rank; nothing elsewhere."""
        return self.control.gather(self.steps, "gathering what the emulated steps took")
