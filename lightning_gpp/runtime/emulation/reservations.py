"""Who has a channel when: all ranks of an emulation reserve channels in one place.

A message takes all of its channels for itself, from the first moment when it is ready and all of
them are free. Reservations are made in the order of the calls, and ranks make them when a message
is ready, so that the first to come is the first to be served.

A sum over ranks is a *meeting*: every rank says when it is ready, the last one reserves.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Meeting(NamedTuple):
    """A sum over ranks.

    Attributes:
        ranks: who takes part.
        number: how many sums these ranks have begun before.
    """

    ranks: tuple[int, ...]
    number: int


class Reservations(Protocol):
    """The channels of a cluster; times are emulated seconds.

    Contract: ``tests/unit/runtime/emulation/test_reservations.py``.
    """

    def reserve(self, channels: Sequence[str], ready_s: float, duration_s: float) -> float:
        """Takes channels for some time.

        Args:
            channels: all of them at once.
            ready_s: not before.
            duration_s: for how long.

        Returns:
            When it starts: when it is ready and what was reserved before has left the channels.
        """

    def meet(
        self, meeting: Meeting, ready_s: float, channels: Sequence[str], duration_s: float
    ) -> None:
        """Says that a rank is ready for a sum; the last of its ranks reserves the channels."""

    def end_s(self, meeting: Meeting) -> float:
        """When a sum ends. Every rank asks once, after all of them have met."""


@dataclass(slots=True)
class _Met:
    """A meeting: how many have come and asked, when the last one was ready, when it ends."""

    num_ranks: int = 0
    num_asked: int = 0
    ready_s: float = 0.0
    end_s: float = 0.0


class LocalReservations:
    """:class:`Reservations` between the threads of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_s: dict[str, float] = {}
        self._met: dict[Meeting, _Met] = {}

    def reserve(self, channels: Sequence[str], ready_s: float, duration_s: float) -> float:
        """Takes channels for some time; returns when that starts."""
        with self._lock:
            return self._reserve(channels, ready_s, duration_s)

    def meet(
        self, meeting: Meeting, ready_s: float, channels: Sequence[str], duration_s: float
    ) -> None:
        """Says that a rank is ready for a sum."""
        with self._lock:
            met = self._met.setdefault(meeting, _Met())
            met.num_ranks += 1
            met.ready_s = max(met.ready_s, ready_s)
            if met.num_ranks == len(meeting.ranks):
                met.end_s = self._reserve(channels, met.ready_s, duration_s) + duration_s

    def end_s(self, meeting: Meeting) -> float:
        """When a sum ends."""
        with self._lock:
            met = self._met[meeting]
            assert met.num_ranks == len(meeting.ranks), f"{meeting}: not all have met"
            met.num_asked += 1
            if met.num_asked == met.num_ranks:
                del self._met[meeting]
            return met.end_s

    def _reserve(self, channels: Sequence[str], ready_s: float, duration_s: float) -> float:
        start_s = max([ready_s, *(self._free_s.get(name, 0.0) for name in channels)])
        self._free_s |= dict.fromkeys(channels, start_s + duration_s)
        return start_s
