"""Sums of gradients that take their emulated time, over any real sums."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from lightning_gpp.emulation.rank import DeviceSum, EmulatedRank
from lightning_gpp.emulation.reservations import Meeting
from lightning_gpp.runtime.sums.sums import PendingSum, Ranks, Sums


class EmulatedSums:
    """The :class:`~lightning_gpp.runtime.sums.sums.Sums` of an emulated rank.

    A sum really begins when its gradients are final in emulated time, so that all its ranks have
    said when they were ready once it is over. It ends when its rounds are done.

    Args:
        inner: sums the tensors.
        rank: the emulated rank that uses it.
    """

    def __init__(self, inner: Sums, rank: EmulatedRank) -> None:
        self._inner = inner
        self._emulated = rank
        self._counts: Counter[Ranks] = Counter()

    def start(self, tensor: Tensor, ranks: Ranks) -> PendingSum:
        """Begins to sum a tensor, as soon as it is final in emulated time."""
        meeting = Meeting(ranks, self._counts[ranks])
        self._counts[ranks] += 1
        found = self._emulated.next_sum()
        pending = _EmulatedSum(self._inner, self._emulated, tensor, meeting, found)
        self._emulated.begin_when_ready(found, pending.begin)
        return pending


class _EmulatedSum:
    def __init__(
        self,
        inner: Sums,
        rank: EmulatedRank,
        tensor: Tensor,
        meeting: Meeting,
        found: DeviceSum,
    ) -> None:
        self._sums, self._emulated, self._tensor = inner, rank, tensor
        self._meeting, self._found = meeting, found
        self._pending: PendingSum | None = None

    def begin(self, ready_s: float) -> None:
        self._emulated.reservations.meet(
            self._meeting, ready_s, self._found.channels, self._found.duration_s
        )
        self._pending = self._sums.start(self._tensor, self._meeting.ranks)

    def wait(self, timeout_s: float, purpose: str) -> None:
        assert self._pending is not None, "a sum begins in the action that starts it"
        self._pending.wait(timeout_s, purpose)
        self._emulated.wait_until(self._emulated.reservations.end_s(self._meeting))
