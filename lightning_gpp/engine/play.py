"""Plays the fixed orders of devices: an event simulation that knows nothing of schedules.

Devices run ahead on their own clocks until they have to wait; what shares channels is served in the
order in which it becomes ready. That is safe: whatever a device does after waiting for a message is
later than when that was ready, so when the earliest is served, no earlier one can still come. It
starts when all of its channels have served those before it (first come, first served; ties in the
order of the devices, and messages of a device before its sums). Nothing overtakes, so what waits
for one channel holds up later ones on the others.

Gradients are summed beside the backward, bucket by bucket (wait-free back-propagation; Shi et al.,
arXiv 1805.03812), as :mod:`lightning_gpp.runtime.sums` does it.

A search plays thousands of items many times, which is why :func:`play` is one long loop.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_gpp.engine.work import Sum, Work

NEVER = -1.0
"""Start of what has not happened."""

ROUNDING = 1e-9
"""By so much seconds may differ that are added up in another order, relatively."""


@dataclass(frozen=True, slots=True)
class Played:
    """The result of playing a step.

    Attributes:
        start_s: when each item starts.
        step_s: seconds until everything is done.
        served: messages (False) and all-reduces (True) that share channels, in the order in which
            they were served: (sender, its own number).
        stuck: device -> the item that it waits at forever.
    """

    start_s: list[float]
    step_s: float
    served: list[tuple[bool, int]]
    stuck: dict[int, int]


def play(work: Work, at_most_s: float = math.inf) -> Played | None:
    """Plays the orders of all devices; None where a device is done too late.

    Args:
        work: what they do.
        at_most_s: the longest step that is of interest. Most of those that are longer are seen to
            be before their end: a device has waited longer than its work leaves time for.
    """
    seconds, sends, hows, lines = work.seconds, work.sends, work.hows, work.lines
    missing, port_s = work.missing.copy(), [0.0] * work.num_ports
    start_s, ready_s = [NEVER] * len(seconds), [0.0] * len(seconds)
    clocks_s, positions, waiting = [0.0] * len(lines), [0] * len(lines), dict[int, int]()
    spares_s = [at_most_s * (1 + ROUNDING) - sum(map(seconds.__getitem__, one)) for one in lines]
    shared = _SharedChannels(work, start_s, port_s)
    summed, runnable = shared.summed, [*range(len(lines))]

    def arrived(at_s: float, items: tuple[int, ...]) -> None:
        for item in items:
            if ready_s[item] < at_s:
                ready_s[item] = at_s
            missing[item] -= 1
            if not missing[item] and item in waiting:
                runnable.append(waiting.pop(item))

    while runnable or shared.queue:
        if not runnable:
            arrived(*shared.serve())
            continue
        number = runnable.pop()
        line, clock_s, spare_s = lines[number], clocks_s[number], spares_s[number]
        for position in range(positions[number], len(line)):
            item = line[position]
            if missing[item]:
                waiting[item], positions[number] = number, position
                break
            if ready_s[item] > clock_s:
                spare_s += clock_s - ready_s[item]
                if spare_s < 0.0:
                    return None
                clock_s = ready_s[item]
            start_s[item] = clock_s
            clock_s += seconds[item]
            for target, how in sends[item]:
                message_s, port, channels = hows[how]
                if channels:
                    shared.push(clock_s, number, False, (message_s, channels, (target,), item))
                    continue
                free_s = port_s[port]
                port_s[port] = at_s = (clock_s if free_s < clock_s else free_s) + message_s
                if ready_s[target] < at_s:
                    ready_s[target] = at_s
                missing[target] -= 1
                if not missing[target] and target in waiting:
                    runnable.append(waiting.pop(target))
            if item in summed:
                for ended in shared.final(item):
                    arrived(*ended)
        clocks_s[number], spares_s[number] = clock_s, spare_s
    stuck, step_s = {waiting[item]: item for item in waiting}, max(*clocks_s, *port_s, shared.end_s)
    return Played(start_s, step_s, shared.served, stuck)


_Waiting = tuple[float, tuple[int, ...], tuple[int, ...], int]
"""Seconds, channels, the items that wait for it, and its sender, or the number of the sum."""

_Entry = tuple[float, int, bool, int, _Waiting]
"""What is ready: when, its device, whether it is a sum, how many were before it, and what it is."""


class _SharedChannels:
    """Messages and sums that share channels.

    Args:
        work: what is played.
        start_s: of all items, as they are played.
        port_s: until when ports are taken.

    Attributes:
        queue: what is ready.
        served: what has been served.
        summed: item -> the sums whose gradients become final in it.
        end_s: when the last one is there.
    """

    def __init__(self, work: Work, start_s: Sequence[float], port_s: list[float]) -> None:
        self._work, self._start_s, self._port_s = work, start_s, port_s
        self._free_s = [0.0] * work.num_channels
        self._num_pushed = 0
        self.queue: list[_Entry] = []
        self.served: list[tuple[bool, int]] = []
        self.end_s = 0.0
        self.summed: dict[int, list[int]] = {}
        self._left = [len(one.last) for one in work.sums]
        self._in_turn: dict[int, deque[int]] = {}
        for number, one in enumerate(work.sums):
            for device, last in zip(one.devices, one.last):
                self.summed.setdefault(last, []).append(number)
                self._in_turn.setdefault(device, deque()).append(number)
        self._begun_s = dict.fromkeys(self._in_turn, 0.0)

    def push(self, ready_s: float, device: int, is_sum: bool, what: _Waiting) -> None:
        """Something is ready that has to wait for its channels."""
        self._num_pushed += 1
        heapq.heappush(self.queue, (ready_s, device, is_sum, self._num_pushed, what))

    def serve(self) -> tuple[float, tuple[int, ...]]:
        """Serves what is ready first: when it is there, and the items that wait for it."""
        ready_s, _, is_sum, _, what = heapq.heappop(self.queue)
        seconds, channels, waiting, number = what
        end_s = max(ready_s, *(self._free_s[channel] for channel in channels)) + seconds
        for channel in channels:
            self._free_s[channel] = end_s
        self.served.append((is_sum, number))
        self.end_s = max(self.end_s, end_s)
        return end_s, waiting

    def final(self, item: int) -> Iterator[tuple[float, tuple[int, ...]]]:
        """An item has begun in which gradients become final: those sums begin whose turn it is.

        Yields:
            Of those without channels the end, and the items that wait for it.
        """
        todo = self.summed[item]
        for number in todo:
            self._left[number] -= 1
        todo = todo.copy()
        while todo:
            number = todo.pop()
            one = self._work.sums[number]
            turns = [self._in_turn[device] for device in one.devices]
            if self._left[number] or any(not turn or turn[0] != number for turn in turns):
                continue
            for turn in turns:
                turn.popleft()
                todo += [turn[0]] if turn else []
            for place, (ready_s, seconds) in enumerate(self._ready(one), 1):
                waiting = one.waiting if place == len(one.buckets) else ()
                if one.channels:
                    what = seconds, one.channels, waiting, number
                    self.push(ready_s, one.place, True, what)
                else:
                    end_s = self._port_s[one.port] = max(ready_s, self._port_s[one.port]) + seconds
                    yield end_s, waiting

    def _ready(self, one: Sum) -> Iterator[tuple[float, float]]:
        """When all devices have begun a bucket, and the seconds of its sum."""
        begun_s, start_s, seconds = self._begun_s, self._start_s, self._work.seconds
        lasts = {(start_s[last], seconds[last]) for last in one.last}
        ready_s = max([begun_s[device] for device in one.devices])
        for fraction, sum_s in one.buckets:
            ready_s = max([ready_s, *(begin_s + fraction * last_s for begin_s, last_s in lasts)])
            yield ready_s, sum_s
        most = max([fraction for fraction, _ in one.buckets])
        for device, last in zip(one.devices, one.last):
            begun_s[device] = max(begun_s[device], start_s[last] + most * seconds[last])
