"""Reservations of emulated channels between threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gpp.emulation.shared import Meeting


@dataclass(slots=True)
class _Met:
    """A meeting: how many have come and asked, when the last one was ready, when it ends."""

    num_ranks: int = 0
    num_asked: int = 0
    ready_s: float = 0.0
    end_s: float = 0.0


class LocalReservations:
    """The reservations of threads of one process."""

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
            if met.num_ranks == len(meeting[0]):
                met.end_s = self._reserve(channels, met.ready_s, duration_s) + duration_s

    def end_s(self, meeting: Meeting) -> float:
        """When a sum ends."""
        with self._lock:
            met = self._met[meeting]
            assert met.num_ranks == len(meeting[0]), f"{meeting}: not all have met"
            met.num_asked += 1
            if met.num_asked == met.num_ranks:
                del self._met[meeting]
            return met.end_s

    def _reserve(self, channels: Sequence[str], ready_s: float, duration_s: float) -> float:
        start_s = max([ready_s, *(self._free_s.get(name, 0.0) for name in channels)])
        self._free_s |= dict.fromkeys(channels, start_s + duration_s)
        return start_s
