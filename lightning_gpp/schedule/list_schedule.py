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
        lines, units, urgency = self.lines, queues.units, queues.urgency
        queue_of: dict[int, int] = {}  # the heads of the queues
        rest = [iter(numbers) for numbers in queues.numbers]
        keys = [urgency[number] for numbers in queues.numbers for number in numbers]
        least = min(keys, default=0)
        scale = max(keys, default=0) - least + 1
        work = (number for numbers in queues.numbers for number in numbers)
        number_of = {key - least: number for key, number in zip(keys, work)}
        heap: list[int] = []

        def show(queue: int) -> None:
            """Looks at the next work of a queue."""
            number = next(rest[queue], None)
            if number is not None:
                queue_of[number] = queue
                if not missing[number]:
                    heapq.heappush(heap, ready[number] * scale + urgency[number] - least)

        for queue in range(len(rest)):
            show(queue)
        while heap:
            entry = heapq.heappop(heap)
            start, key = divmod(entry, scale)
            number = number_of[key]
            queue = queue_of[number]
            device = queues.devices[queue]
            if free[device] > start:  # it got busy since
                heapq.heappush(heap, free[device] * scale + key)
                continue
            del queue_of[number]
            lines[device].append(number)
            end = free[device] = start + units[number]
            for user in users[number]:
                missing[user] -= 1
                if ready[user] < end:
                    ready[user] = end
                if not missing[user] and user in queue_of:
                    heapq.heappush(heap, ready[user] * scale + urgency[user] - least)
            show(queue)
        if queue_of:
            raise ValueError("the orders of the stages wait for each other in a circle")
