"""Emulated time, as it passes on this machine's monotonic clock, and where a rank is on it.

Every training step begins at one emulated moment on all ranks. Between its forward and its backward
part the user's step runs, and emulated time stands still.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


class EmulatedClock:
    """The clock that all ranks of an emulation share.

    Args:
        origin_ns: when emulated time is zero, by ``now_ns``; the same on all ranks of a host.
        time_scale: seconds here that an emulated second takes.
        now_ns: reads the clock of this machine.
        sleep: lets seconds of it pass, or raises what ends all waits.
    """

    def __init__(
        self,
        origin_ns: int,
        time_scale: float = 1.0,
        *,
        now_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.origin_ns, self.time_scale = origin_ns, time_scale
        self._now_ns, self._sleep = now_ns, sleep

    def now_s(self) -> float:
        """Emulated seconds since the origin; below zero before it."""
        return (self._now_ns() - self.origin_ns) * 1e-9 / self.time_scale

    def sleep_until(self, moment_s: float) -> None:
        """Returns at an emulated moment; at once when it is over."""
        while (left_s := (moment_s - self.now_s()) * self.time_scale) > 0:
            self._sleep(min(left_s, 3600.0))

    def go_back(self, seconds_s: float) -> None:
        """Sets it back by emulated seconds, as if the time since then had not passed.

        All ranks have to do so by as much, and between two messages.
        """
        self.origin_ns += round(seconds_s * self.time_scale * 1e9)


@dataclass(frozen=True, slots=True)
class EmulatedStep:
    """A training step on one rank, in emulated seconds.

    Attributes:
        start_s: when it began, on all ranks.
        end_s: when this rank's part was over.
        num_microbatches: smallest micro-batches of the mini-batch.
        slip_s: by how much actions here ended later than their emulated ends.
    """

    start_s: float
    end_s: float
    num_microbatches: int
    slip_s: float = 0.0
