"""State that all emulated ranks share: the clock, and the reservations of channels.

Every training step begins at one emulated moment on all ranks. Between its forward and its backward
part the user's step runs, and emulated time stands still.

Who has a channel when is in one file, on which one rank at a time works (``flock``). A message
takes all of its channels for itself, from the first moment when it is ready and all of them are
free. Reservations are made in the order of the calls, and ranks make them when a message is ready,
so that the first to come is the first to be served. A sum over ranks is a *meeting*: every rank
says when it is ready, the last one reserves.
"""

from __future__ import annotations

import contextlib
import fcntl
import marshal
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


class EmulatedClock:
    """The clock that all ranks of an emulation share.

    Args:
        origin_ns: real time at which emulated time is zero, as of ``now_ns``; the same on all ranks
            of a host.
        time_scale: real seconds per emulated second.
        now_ns: reads the clock of this machine.
        sleep: sleeps for real seconds, or raises the error that ends all waits.
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


_FreeS = dict[str, float]

Meeting = tuple[tuple[int, ...], int]
"""Ranks that sum, and how many sums these have begun before."""

_Open = dict[Meeting, list[float]]
"""How many have come and asked, when the last was ready, when it ends."""


class SharedReservations:
    """Reservations of a cluster's channels, shared by the processes of a host.

    Args:
        path: the file; in a folder of one host, on a file system in memory if there is one.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def reserve(self, channels: Sequence[str], ready_s: float, duration_s: float) -> float:
        """Takes channels for some time, all of them at once.

        Returns:
            When it starts: when it is ready and what was reserved before has left the channels.
        """
        with self._alone() as (free_s, _):
            return _reserve(free_s, channels, ready_s, duration_s)

    def meet(
        self, meeting: Meeting, ready_s: float, channels: Sequence[str], duration_s: float
    ) -> None:
        """Says that a rank is ready for a sum; the last of its ranks reserves the channels."""
        with self._alone() as (free_s, meetings):
            met = meetings.setdefault(meeting, [0, 0, 0.0, 0.0])
            met[0] += 1
            met[2] = max(met[2], ready_s)
            if met[0] == len(meeting[0]):
                met[3] = _reserve(free_s, channels, met[2], duration_s) + duration_s

    def end_s(self, meeting: Meeting) -> float:
        """When a sum ends. Every rank asks once, after all of them have met."""
        with self._alone() as (_, meetings):
            met = meetings[meeting]
            assert met[0] == len(meeting[0]), f"{meeting}: {met}"
            met[1] += 1
            if met[1] == met[0]:
                del meetings[meeting]
            return met[3]

    def close(self) -> None:
        """Lets go of the file, which whoever chose its name removes."""
        os.close(self._file)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[tuple[_FreeS, _Open]]:
        fcntl.flock(self._file, fcntl.LOCK_EX)  # the kernel unlocks it for a rank that is killed
        try:
            held = os.pread(self._file, os.fstat(self._file).st_size, 0)
            tables = marshal.loads(held) if held else ({}, {})
            yield tables
            held = marshal.dumps(tables)
            os.pwrite(self._file, held, 0)
            os.ftruncate(self._file, len(held))
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def _reserve(free_s: _FreeS, channels: Sequence[str], ready_s: float, duration_s: float) -> float:
    start_s = max([ready_s, *(free_s.get(name, 0.0) for name in channels)])
    free_s |= dict.fromkeys(channels, start_s + duration_s)
    return start_s
