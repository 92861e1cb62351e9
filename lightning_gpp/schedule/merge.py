"""Merges the orders of stages that share a device.

A device with one stage keeps that stage's order. Where several stages share a device, their
orders are merged by list scheduling with unit times (a unit's forward takes one, its backward two):
the device runs whichever of its next actions can start first. Every stage keeps its own order, so
whatever the orders guarantee still holds. Where all stages do all of their forwards first, so does
the device: all forwards are merged before any backward, also those that could start early.

Of several actions that can start at once, a device runs the backward first, then the lower
micro-batch, then the later stage. Where all forwards come first it runs the most urgent one: if one
unit after the other is to be done at some pace, the last unit of a micro-batch says when it is due,
and the path that it has still to go (:class:`PathLengths`) how much earlier it has to start. A plan
says the pace as a part of what the busiest device needs for a unit: with 0 the longest path goes
first, which keeps later devices fed where a chain goes round the devices several times; with 1 a
device finishes what it has begun. Where a plan does not say it, that of one unit of time or of the
busiest device is taken, whichever ends earlier.

How far what a stage makes has still to go: who is first where one of several has to wait.

A device sends its messages one after the other, and where it holds several stages it runs one
action at a time. Where all forwards come first, every stage ends its half at its own work plus the
path behind it, so what has the longest path to go is served first:

.. code-block:: text

    0 ──▶ 1 ──▶ 2 ──▶ 4     stage 0 sends to 1 before it sends to 3, which has time
    └───────▶ 3 ──────┘

Forwards against backwards is no question of paths alone, so schedules that mix them are not ordered
by this.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from lightning_gpp.graph import FEED, StageEdge
from lightning_gpp.schedule.action import BACKWARD_UNITS, FORWARD_UNITS
from lightning_gpp.schedule.schedules import Steps


@dataclass(frozen=True, slots=True)
class PathLengths:
    """Length of the longest path to the end of the forwards or backwards, in units.

    Attributes:
        forward: of every stage to the end of the forwards, its own micro-batch included.
        backward: of every stage back to the end of the backwards, likewise.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]


def path_lengths(units: Sequence[float], edges: Iterable[StageEdge]) -> PathLengths:
    """The longest paths in a stage graph, or in that of a program.

    Args:
        units: in one micro-batch of every stage (of one of its replicas).
        edges: between the stages.

    >>> pairs = [(0, 1), (0, 3), (1, 2), (2, 4), (3, 4)]
    >>> path_lengths([1, 1, 1, 1, 2], [StageEdge(*pair, ("x",)) for pair in pairs])
    PathLengths(forward=(5, 4, 3, 3, 2), backward=(1, 2, 3, 2, 5))
    """
    inner = sorted((e for e in edges if e.source != FEED), key=lambda e: (e.source, e.target))
    forward, backward = list(units), list(units)
    for edge in reversed(inner):
        ahead = units[edge.source] + forward[edge.target]
        forward[edge.source] = max(forward[edge.source], ahead)
    for edge in inner:
        if edge.has_backward:
            behind = units[edge.target] + backward[edge.source]
            backward[edge.target] = max(backward[edge.target], behind)
    return PathLengths(tuple(forward), tuple(backward))


class StageQueue(NamedTuple):
    """The steps of a stage, or of the feed, as numbered work.

    Attributes:
        device: device of the stage.
        steps: its forwards and backwards in order; of the feed the backwards alone.
        numbers: of these steps.
        units: in one of its micro-batches.
        piece: units between the first ones of two micro-batches.
        start: first unit of its first micro-batch.
    """

    device: int
    steps: Steps
    numbers: Sequence[int]
    units: int
    piece: int
    start: int = 0


Needs = tuple[int, int, Sequence[tuple[int, int, int]]]
"""Two numbers, and pairs of offsets to them (the third is not read): the work of the first that is
needed, and that of the second that needs it."""


def merge_queues(
    queues: Sequence[StageQueue],
    needs: Iterable[Needs],
    lengths: PathLengths | None,
    *,
    num_devices: int,
    num_works: int,
    pace: float | None = None,
) -> list[list[int]]:
    """The order of numbered work on every device.

    Args:
        queues: of all stages, and last of the feed, whose work takes no time.
        needs: which work needs which other, those in one queue left out.
        lengths: where all forwards come first, of the paths behind the stages; otherwise None.
        num_devices: how many devices there are.
        num_works: more than all numbers.
        pace: of units, as a part of what the busiest device needs; None takes one that ends early.

    Raises:
        ValueError: the orders of the stages wait for each other in a circle.
    """
    work = _Work([0] * num_works, [0] * num_works, [[] for _ in range(num_works)])
    missing, users = [0] * num_works, work.users
    for sender, receiver, each in needs:
        for own, other, _ in each:
            users[sender + own].append(receiver + other)
            missing[receiver + other] += 1
    stages_on = Counter(queue.device for queue in queues if queue.numbers)
    # where all forwards come first these, and the rest: on devices with one stage, and on others
    halves: list[tuple[list[int], list[int]]] = [([], []), ([], [])]
    for queue in queues:
        forward, count = queue.units * FORWARD_UNITS, len(queue.numbers)
        low, backward = min(queue.numbers, default=0), queue.units * BACKWARD_UNITS
        num_forwards = sum(step >= 0 for step in queue.steps)
        work.device_of[low : low + count] = [queue.device] * count
        if queue is not queues[-1]:
            seconds = [forward] * num_forwards + [backward] * (count - num_forwards)
            work.units[low : low + count] = seconds
        stop = count if lengths is None else num_forwards
        for part, half in zip((queue.numbers[:stop], queue.numbers[stop:]), halves):
            half[stages_on[queue.device] > 1].extend(part)
            for before, behind in pairwise(part):
                users[before].append(behind)
                missing[behind] += 1
    paces = [1.0] if lengths is None else _paces(queues, pace)
    found = []
    for unit_pace in paces:
        urgency = _urgency(queues, lengths, stages_on, num_works, unit_pace)
        lines: list[list[int]] = [[] for _ in range(num_devices)]
        free = [0] * num_devices
        waiting, ready = missing.copy(), [0] * num_works
        for alone, others in halves if lengths else halves[:1]:
            order = sorted(others, key=urgency.__getitem__)
            _schedule(order, alone, work, waiting, ready, free, lines)
        found.append((max(free), lines))
    return min(found, key=itemgetter(0))[1]


class _Work(NamedTuple):
    """Work by numbers.

    Attributes:
        units: how long it takes.
        device_of: where it runs.
        users: which others wait for it.
    """

    units: list[int]
    device_of: list[int]
    users: list[list[int]]


def _urgency(
    queues: Sequence[StageQueue],
    lengths: PathLengths | None,
    stages_on: Mapping[int, int],
    num_works: int,
    pace: float,
) -> list[int]:
    """The keys by which one of several pieces of work goes first, as whole numbers."""
    num_queues = len(queues)
    found = [0] * num_works
    for position, queue in enumerate(queues):
        if stages_on[queue.device] == 1:
            continue
        place = -1 if position == num_queues - 1 else position  # the feed is before all
        behind = 0, 0
        if lengths is not None and place != -1:
            behind = int(lengths.forward[position]), int(lengths.backward[position])
        done = [0, 0]  # forwards and backwards; a schedule may have these in reverse
        for step, number in zip(queue.steps, queue.numbers):
            is_back = step < 0
            turn_of = done[is_back]
            done[is_back] += 1
            first = int(not is_back)
            if lengths is not None:
                last = turn_of * queue.piece + queue.start + queue.units
                first = int(last * pace) - behind[is_back]
            found[number] = (first * num_works + turn_of) * (num_queues + 2) + num_queues - place
    return found


def _paces(queues: Sequence[StageQueue], pace: float | None) -> list[float]:
    """Units of time after which one unit is due after the other: of each one order is made."""
    busy: dict[int, float] = {}
    for queue in queues[:-1]:
        busy[queue.device] = busy.get(queue.device, 0.0) + queue.units / queue.piece
    most = max(busy.values())
    return sorted({1.0, float(math.ceil(most))}) if pace is None else [pace * most]


def _schedule(
    order: Sequence[int],
    alone: Sequence[int],
    work: _Work,
    missing: list[int],
    ready: list[int],
    free: list[int],
    lines: list[list[int]],
) -> None:
    """Appends work to the orders of its devices: what can start first, then what is first.

    Everything is a whole number, so that a search can merge the stages of thousands of plans. Where
    a device has one stage nothing is to be chosen: its work starts as soon as it can.

    Args:
        order: the work of devices with several stages, in the order in which it goes first.
        alone: the work of the others.
        work: how long it takes, and where.
        missing: how many others each waits for; counted down.
        ready: when all of them are done; changed.
        free: when every device is; changed.
        lines: the work of every device in its order; changed.
    """
    units, device_of, users = work
    left, num_works = len(order) + len(alone), max(1, len(order))
    turn = [-1] * len(missing)
    for place, number in enumerate(order):
        turn[number] = place
    # a start, and the turn of what can start then, as one number
    heap = [ready[n] * num_works + turn[n] for n in order if not missing[n]]
    heapq.heapify(heap)
    able = [number for number in alone if not missing[number]]
    while able or heap:
        if able:
            number = able.pop()
            device, start = device_of[number], ready[number]
            if free[device] > start:
                start = free[device]
        else:
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
                if turn[user] < 0:
                    able.append(user)
                else:
                    heapq.heappush(heap, ready[user] * num_works + turn[user])
    if left:
        raise ValueError("the orders of the stages wait for each other in a circle")
