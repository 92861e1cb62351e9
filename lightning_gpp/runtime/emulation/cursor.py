"""Where a rank is on the emulated clock."""

from __future__ import annotations

from lightning_gpp.runtime.emulation.clock import EmulatedClock
from lightning_gpp.runtime.emulation.slip import Slip, SlipReport


class EmulatedCursor:
    """The moment at which a rank is, by the emulated clock.

    Args:
        rank: which.
        clock: of all ranks.

    Attributes:
        cursor_s: the emulated moment.
    """

    def __init__(self, rank: int, clock: EmulatedClock) -> None:
        self.rank = rank
        self.clock = clock
        self.cursor_s = 0.0
        self._late_s = 0.0
        self._slips: list[Slip] = []

    def spend(self, what: str, duration_s: float) -> None:
        """Lets emulated time pass.

        Nothing is late that takes no time: what follows it makes up for it, or slips.
        """
        if duration_s <= 0:
            return
        end_s, now_s = self.cursor_s + duration_s, self.clock.now_s()
        if now_s > end_s:
            self._slips.append(Slip(self.rank, what, now_s - end_s))
            self.cursor_s = now_s
        else:
            self.cursor_s = end_s
            self.clock.sleep_until(end_s)

    def wait_until(self, moment_s: float) -> None:
        """Waits for something that comes at a moment, if it is still to come."""
        self.cursor_s = max(self.cursor_s, moment_s)
        self._late_s = self.clock.now_s() - self.cursor_s
        self.clock.sleep_until(self.cursor_s)

    def end(self, what: str) -> None:
        """Nothing follows that could make up for it if the last wait began late: a slip."""
        if self._late_s > 0:
            self._slips.append(Slip(self.rank, what, self._late_s))
            self.cursor_s += self._late_s

    def take_slips(self) -> SlipReport:
        """What has slipped since the last call."""
        found, self._slips = SlipReport(tuple(self._slips)), []
        return found
