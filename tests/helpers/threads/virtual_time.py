"""Time that passes only while all threads wait: what they do is exact, and the same in every run.

One thread runs at a time. When it waits, the next one is that which was told to go on, or whose
sleep ends first; of several the lowest rank.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_gpp.emulation.shared import EmulatedClock


class VirtualTime:
    """The time of some threads, and their turns.

    Args:
        num_threads: how many take part; none runs before all have come.

    Attributes:
        now_ns: what the clock shows.
    """

    def __init__(self, num_threads: int) -> None:
        self.now_ns = 0
        self._lock = threading.RLock()
        self._turns = [threading.Condition(self._lock) for _ in range(num_threads)]
        self._next: list[tuple[int, int]] = []
        self._running: int | None = None
        self._num_to_come = num_threads
        self._rank_of: dict[int, int] = {}

    def clock(self, time_scale: float) -> EmulatedClock:
        """An emulated clock that shows it."""
        return EmulatedClock(0, time_scale, now_ns=lambda: self.now_ns, sleep=self._sleep)

    def condition(self) -> VirtualCondition:
        """For threads that wait for each other."""
        return VirtualCondition(self)

    @contextmanager
    def thread(self, rank: int) -> Iterator[None]:
        """The body is a thread that takes part."""
        self._rank_of[threading.get_ident()] = rank
        with self._lock:
            self._num_to_come -= 1
            self.wake(rank, 0)
            self.give_turn()
        try:
            yield
        finally:
            with self._lock:
                self._running = None
                self._choose()

    def rank(self) -> int:
        """Of the thread that asks."""
        return self._rank_of[threading.get_ident()]

    def wake(self, rank: int, after_ns: int = 0) -> None:
        """Lets a thread go on after some time; the lock is held."""
        heapq.heappush(self._next, (self.now_ns + after_ns, rank))

    def give_turn(self) -> None:
        """Lets others run until it is this thread's turn; the lock is held, once."""
        rank = self.rank()
        if self._running in (None, rank):
            self._running = None
            self._choose()
        while self._running != rank:
            assert self._turns[rank].wait(60), "all threads wait for each other"

    def _sleep(self, seconds: float) -> None:
        with self._lock:
            self.wake(self.rank(), math.ceil(seconds * 1e9))
            self.give_turn()

    def _choose(self) -> None:
        if self._next and not self._num_to_come:
            moment_ns, self._running = heapq.heappop(self._next)
            self.now_ns = max(self.now_ns, moment_ns)
            self._turns[self._running].notify()


class VirtualCondition:
    """Stands for a :class:`threading.Condition` between threads of a :class:`VirtualTime`."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._waiting: list[int] = []

    def __enter__(self) -> VirtualCondition:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        """Lets others run until it is notified, whatever the limit."""
        with self._time._lock:
            self._waiting.append(self._time.rank())
            self._time.give_turn()

    def wait_for(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        """Likewise, until something holds."""
        while not is_over():
            self.wait(timeout_s)

    def notify_all(self) -> None:
        """All that wait go on, when it is their turn."""
        with self._time._lock:
            for rank in self._waiting:
                self._time.wake(rank)
            self._waiting.clear()
