"""List scheduling of numbered work: devices run whichever of their next pieces can start first.

Everything is a whole number, so that a search can merge the stages of thousands of plans: work is
numbered, times are whole, and an entry of the heap is one number, of a start and an urgency.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


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
        lines, units, urgency, devices = self.lines, queues.units, queues.urgency, queues.devices
        keys = [urgency[number] for numbers in queues.numbers for number in numbers]
        least = min(keys, default=0)
        scale = max(keys, default=0) - least + 1
        number_of: dict[int, int] = {}
        device_of: dict[int, int] = {}
        behind: dict[int, int] = {}  # of all work but the last of a queue, what follows
        heap: list[int] = []
        for numbers, device in zip(queues.numbers, devices):
            number_of |= zip([urgency[number] - least for number in numbers], numbers)
            device_of |= dict.fromkeys(numbers, device)
            behind |= zip(numbers, numbers[1:])
            for number in numbers[1:]:
                missing[number] += 1  # the one before it in its queue
            for number in numbers[:1]:
                if not missing[number]:
                    heap.append(ready[number] * scale + urgency[number] - least)
        heapq.heapify(heap)
        left = len(keys)
        while heap:
            start, key = divmod(heap[0], scale)
            number = number_of[key]
            device = device_of[number]
            if free[device] > start:  # it got busy since
                heapq.heapreplace(heap, free[device] * scale + key)
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
                    heapq.heappush(heap, ready[user] * scale + urgency[user] - least)
            if number in behind:
                user = behind[number]
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(heap, ready[user] * scale + urgency[user] - least)
        if left:
            raise ValueError("the orders of the stages wait for each other in a circle")
