"""Emulated time: seconds of the emulated machine, as they pass on this one's monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_UP_S = 0.25
"""Seconds of a sleep after which a rank looks whether another one has failed."""


class EmulatedClock:
    """The clock that all ranks of an emulation share.

    Args:
        origin_ns: when emulated time is zero, by ``now_ns``; the same on all ranks of a host.
        time_scale: seconds here that an emulated second takes.
        now_ns: reads the clock of this machine.
        sleep: lets seconds of it pass.

    Raises:
        ValueError: the scale is not above zero.
    """

    def __init__(
        self,
        origin_ns: int,
        time_scale: float = 1.0,
        *,
        now_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not time_scale > 0:
            raise ValueError(f"time_scale must be above 0, got {time_scale}")
        self.origin_ns = origin_ns
        self.time_scale = time_scale
        self._now_ns = now_ns
        self._sleep = sleep
        self._error: BaseException | None = None

    def now_s(self) -> float:
        """Emulated seconds since the origin; below zero before it."""
        return (self._now_ns() - self.origin_ns) * 1e-9 / self.time_scale

    def sleep_until(self, moment_s: float) -> None:
        """Returns at an emulated moment; at once when it is over.

        Raises:
            BaseException: the error of :meth:`abort`.
        """
        while (left_s := (moment_s - self.now_s()) * self.time_scale) > 0:
            self._check()
            self._sleep(min(left_s, LOOK_UP_S))
        self._check()

    def go_back(self, seconds_s: float) -> None:
        """Sets it back by emulated seconds, as if the time since then had not passed.

        All ranks have to do so by as much, and between two messages.
        """
        self.origin_ns += round(seconds_s * self.time_scale * 1e9)

    def abort(self, error: BaseException) -> None:
        """Ends the sleep of all that use this clock, now and later, with ``error``."""
        self._error = self._error or error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
