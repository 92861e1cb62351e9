"""Sums of tensors over threads of one process."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from lightning_gpp.runtime.sums import PendingSum, Ranks
from lightning_gpp.runtime.waits import TransportError, Waits, too_late


class ThreadSumHub:
    """Joins the sums of threads of one process."""

    def __init__(self, condition: Callable[[], Any] = threading.Condition) -> None:
        self.changed = condition()
        self._open: dict[tuple[Ranks, int], _Meeting] = {}

    def join(self, ranks: Ranks, number: int, rank: int, tensor: Tensor) -> _Meeting:
        """Adds one rank's tensor to a sum; the last one adds up, in the order of the ranks."""
        with self.changed:
            meeting = self._open.setdefault((ranks, number), _Meeting(ranks))
            meeting.tensors[rank] = tensor
            if len(meeting.tensors) == len(ranks):
                del self._open[ranks, number]
                meeting.add_up()
                self.changed.notify_all()
            return meeting


@dataclass(slots=True)
class _Meeting:
    """One sum of several threads."""

    ranks: Ranks
    tensors: dict[int, Tensor] = field(default_factory=dict)
    is_done: bool = False

    def add_up(self) -> None:
        first, *others = [self.tensors[rank] for rank in self.ranks]
        total = first.clone()
        for other in others:
            total += other
        for tensor in self.tensors.values():
            tensor.copy_(total)
        self.is_done = True


class ThreadSums:
    """The :class:`~lightning_gpp.runtime.sums.Sums` of one thread."""

    def __init__(self, hub: ThreadSumHub, rank: int) -> None:
        self._hub, self._rank = hub, rank
        self._counts: Counter[Ranks] = Counter()
        self.waits = Waits()
        self.waits.on_abort.append(self._wake)

    def start(self, tensor: Tensor, ranks: Ranks) -> PendingSum:
        """Adds the tensor to those of the others."""
        number = self._counts[ranks]
        self._counts[ranks] += 1
        return partial(self.wait, self._hub.join(ranks, number, self._rank, tensor))

    def _wake(self) -> None:
        with self._hub.changed:
            self._hub.changed.notify_all()

    def wait(self, meeting: _Meeting, timeout_s: float, purpose: str) -> None:
        """Waits for a sum."""
        deadline = time.monotonic() + timeout_s
        with self._hub.changed:
            while not meeting.is_done:
                self.waits.check()
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise TransportError(too_late(purpose, _not_summed(meeting.ranks), timeout_s))
                self._hub.changed.wait(remaining_s)
            self.waits.check()


def _not_summed(ranks: Ranks) -> str:
    return f"the gradients of ranks {', '.join(map(str, ranks))} were not summed"
