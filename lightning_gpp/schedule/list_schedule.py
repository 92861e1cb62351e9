"""List scheduling of numbered work: devices run whichever of their next pieces can start first.

Everything is a whole number, so that a search can merge the stages of thousands of plans: work is
numbered, times are whole, and an entry of the heap is one number, of a start and a turn.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise


@dataclass(slots=True)
class Queues:
    """Work in queues, each with its own order, on devices.

    Attributes:
        numbers: of every queue, its work in order.
        devices: of every queue, where it runs.
        units: of every piece of work, how long it takes.
        urgency: of every piece of work; of several that can start at once the least goes first.
            Those in the queues all differ.
        missing: of every piece of work, how many others it waits for beside those in its queue.
        users: of every piece of work, which others wait for it.
    """

    numbers: Sequence[Sequence[int]]
    devices: Sequence[int]
    units: Sequence[int]
    urgency: Sequence[int]
    missing: list[int]
    users: Sequence[Sequence[int]]


class ListSchedule:
    """The orders of devices, queue by queue added to them.

    Args:
        num_devices: how many devices there are.
        num_works: pieces of work.

    Attributes:
        lines: the work of every device in its order so far.
    """

    def __init__(self, num_devices: int, num_works: int) -> None:
        self.lines: list[list[int]] = [[] for _ in range(num_devices)]
        self._free = [0] * num_devices
        self._ready = [0] * num_works

    @property
    def end(self) -> int:
        """When the last device is done."""
        return max(self._free, default=0)

    def add(self, queues: Queues) -> None:
        """Appends the work of some queues to the orders of their devices.

        ``missing`` of the queues is counted down.

        Raises:
            ValueError: queues wait for each other in a circle.
        """
        missing, users, ready, free = queues.missing, queues.users, self._ready, self._free
        lines, units = self.lines, queues.units
        order = sorted(chain.from_iterable(queues.numbers), key=queues.urgency.__getitem__)
        num_works = len(order)
        turn, device_of = [0] * len(missing), [0] * len(missing)
        behind = [-1] * len(missing)  # what follows in the queue, if anything
        for place, number in enumerate(order):
            turn[number] = place
        heap: list[int] = []  # a start, and the turn of what can start then, as one number
        for numbers, device in zip(queues.numbers, queues.devices):
            for number in numbers:
                device_of[number] = device
            for number, user in pairwise(numbers):
                behind[number] = user
                missing[user] += 1
            for number in numbers[:1]:
                if not missing[number]:
                    heap.append(ready[number] * num_works + turn[number])
        heapq.heapify(heap)
        left = num_works
        while heap:
            start, place = divmod(heap[0], num_works)
            number = order[place]
            device = device_of[number]
            if free[device] > start:  # it got busy since
                heapq.heapreplace(heap, free[device] * num_works + place)
                continue
            heapq.heappop(heap)
            left -= 1
            lines[device].append(number)
            end = free[device] = start + units[number]
            for user in users[number]:
                missing[user] -= 1
                if ready[user] < end:
                    ready[user] = end
                if not missing[user]:
                    heapq.heappush(heap, ready[user] * num_works + turn[user])
            user = behind[number]
            if user >= 0:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(heap, ready[user] * num_works + turn[user])
        if left:
            raise ValueError("the orders of the stages wait for each other in a circle")
