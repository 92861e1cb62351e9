"""Emulated time, as it passes on this machine's monotonic clock, and where a rank is on it.

Every training step begins at one emulated moment on all ranks. Between its forward and its backward
part the user's step runs, and emulated time stands still.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


class EmulatedClock:
    """The clock that all ranks of an emulation share.

    Args:
        origin_ns: when emulated time is zero, by ``now_ns``; the same on all ranks of a host.
        time_scale: seconds here that an emulated second takes.
        now_ns: reads the clock of this machine.
        sleep: lets seconds of it pass, or raises what ends all waits.

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
class Slip:
    """Something ended later than its emulated end; what follows on its rank is later by as much.

    Attributes:
        rank: where.
        what: text form of the action (``"2F0"``), or what else it was (``"optimizer"``).
        late_s: by how much, in emulated seconds.
    """

    rank: int
    what: str
    late_s: float


@dataclass(frozen=True, slots=True)
class EmulatedStep:
    """A training step on one rank, in emulated seconds.

    Attributes:
        start_s: when it began, on all ranks.
        end_s: when this rank's part was over.
        num_microbatches: smallest micro-batches of the mini-batch.
        slips: what did not fit its emulated time here.
        since: steps since the pipeline was empty, where it does not drain after each.
    """

    start_s: float
    end_s: float
    num_microbatches: int
    slips: tuple[Slip, ...] = ()
    since: int = 0


@dataclass(frozen=True)
class SlipReport:
    """All slips of a step on one or all ranks.

    Attributes:
        slips: in the order of time on each rank.
    """

    slips: tuple[Slip, ...] = ()

    @property
    def total_s(self) -> float:
        """Emulated seconds by which the rank that slipped most is late."""
        ranks = {slip.rank for slip in self.slips}
        late_s = (sum(s.late_s for s in self.slips if s.rank == rank) for rank in ranks)
        return max(late_s, default=0.0)

    def text(self, step_s: float) -> str:
        """One line for a report.

        >>> SlipReport((Slip(0, "2F0", 0.25), Slip(1, "1B3", 0.5))).text(10.0)
        'slip 5.0 % of the step (0.5 s on the rank that slipped most); worst: 1B3 on rank 1, 0.5 s'
        """
        if not self.slips:
            return "no slip: all real work fitted its emulated time"
        worst = max(self.slips, key=lambda slip: slip.late_s)
        return (
            f"slip {100 * self.total_s / step_s:.1f} % of the step ({self.total_s:.3g} s on the "
            f"rank that slipped most); worst: {worst.what} on rank {worst.rank}, "
            f"{worst.late_s:.3g} s"
        )


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
    def part(self, num_microbatches: int, *, is_second: bool) -> Iterator[None]:
        """All ranks: the body runs a step, or one of its parts, at the emulated devices' pace.

        Args:
            num_microbatches: of the mini-batch.
            is_second: whether it is the backward part.
        """
        cursor, control = self.cursor, self._control
        if is_second:
            before = self.steps.pop()
            with control.together():
                found = control.share(self.resumption(), "waiting for rank 0 to go on with a step")
            self.resume(found)
            cursor.wait_until(found[1])  # nobody goes on before rank 0 has come that far
            start_s, slips = before.start_s, before.slips
        else:
            start_s, slips = self.begin(), ()
        cursor.take_slips()
        yield
        slips += cursor.take_slips().slips
        self.steps.append(EmulatedStep(start_s, cursor.cursor_s, num_microbatches, slips))

    def begin(self) -> float:
        """All ranks: waits for the moment at which a step begins, once all have ended theirs."""
        with self._control.together():
            start_s: float = self._control.combined(
                self.cursor.cursor_s,
                lambda ends_s: max(self.next_start_s(), *ends_s),
                "waiting for all ranks to end a step",
            )
        self.cursor.wait_until(start_s)
        return start_s

    def resumption(self) -> tuple[float, float]:
        """Rank 0: when emulated time goes on, and how far rank 0 has come."""
        return self.next_start_s(), self.cursor.cursor_s

    def resume(self, resumption: tuple[float, float]) -> None:
        """All ranks: emulated time goes on, as if it had stood still until rank 0's resumption."""
        moment_s, leader_s = resumption
        self.cursor.clock.go_back(max(0.0, moment_s - leader_s))
        self.cursor.wait_until(self.cursor.cursor_s)

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
