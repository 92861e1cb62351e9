"""A clock that only goes on when it is told to."""

from __future__ import annotations

from lightning_gpp.emulation.clock import EmulatedClock


class FakeTime:
    """Stands for the machine's clock.

    Attributes:
        now_ns: what it shows.
        slept_s: seconds of all sleeps.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.slept_s = 0.0

    def work(self, seconds: float) -> None:
        """Real work that takes some time."""
        self.now_ns += round(seconds * 1e9)

    def sleep(self, seconds: float) -> None:
        """Like ``time.sleep``."""
        self.slept_s += seconds
        self.work(seconds)

    def clock(self, time_scale: float = 1.0) -> EmulatedClock:
        """An emulated clock that begins now."""
        return EmulatedClock(self.now_ns, time_scale, now_ns=lambda: self.now_ns, sleep=self.sleep)
