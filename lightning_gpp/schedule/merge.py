"""Merges the orders of the stages that live on one device into one order.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from lightning_gpp.graph import FEED, StageEdge
from lightning_gpp.schedule.action import BACKWARD_UNITS, FORWARD_UNITS
from lightning_gpp.schedule.schedules import Steps


@dataclass(frozen=True, slots=True)
class PathLengths:
    """Units that stages work on one after the other on the longest path to the end of a half.

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
    """The steps of a stage of a program, or of the feed, as numbered work.

    Attributes:
        device: where it runs.
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


def merge_queues(
    queues: Sequence[StageQueue],
    needs: Iterable[tuple[int, int]],
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
    units, missing = [0] * num_works, [0] * num_works
    for queue in queues[:-1]:
        forward, backward = queue.units * FORWARD_UNITS, queue.units * BACKWARD_UNITS
        for step, number in zip(queue.steps, queue.numbers):
            units[number] = forward if step >= 0 else backward
    users: list[tuple[int, ...]] = [()] * num_works
    for user, needed in needs:
        missing[user] += 1
        users[needed] += (user,)
    device_of = [0] * num_works
    halves: list[list[int]] = [[], []]  # where all forwards come first: these, and the rest
    for queue in queues:
        parts: tuple[list[int], list[int]] = [], []
        for step, number in zip(queue.steps, queue.numbers):
            device_of[number] = queue.device
            parts[lengths is not None and step < 0].append(number)
        for part, half in zip(parts, halves):
            half += part
            for before, behind in pairwise(part):
                missing[behind] += 1
                users[before] += (behind,)
    paces = [1.0] if lengths is None else _paces(queues, pace)
    found = []
    for unit_pace in paces:
        urgency = _urgency(queues, lengths, num_works, unit_pace)
        lines: list[list[int]] = [[] for _ in range(num_devices)]
        free = [0] * num_devices
        waiting, ready = missing.copy(), [0] * num_works
        for half in halves:
            order = sorted(half, key=urgency.__getitem__)
            _schedule(order, device_of, units, users, waiting, ready, free, lines)
        found.append((max(free), lines))
    return min(found, key=itemgetter(0))[1]


def _urgency(
    queues: Sequence[StageQueue], lengths: PathLengths | None, num_works: int, pace: float
) -> list[int]:
    """The keys by which one of several pieces of work goes first, as whole numbers."""
    num_queues = len(queues)
    found = [0] * num_works
    for position, queue in enumerate(queues):
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
    device_of: Sequence[int],
    units: Sequence[int],
    users: Sequence[Sequence[int]],
    missing: list[int],
    ready: list[int],
    free: list[int],
    lines: list[list[int]],
) -> None:
    """Appends work to the orders of its devices: what can start first, then what is first.

    Everything is a whole number, so that a search can merge the stages of thousands of plans.

    Args:
        order: the work; of what can start at once the first one goes first.
        device_of: where work runs.
        units: how long it takes.
        users: which others wait for it.
        missing: how many others it waits for; counted down.
        ready: when all of them are done; changed.
        free: when every device is; changed.
        lines: the work of every device in its order; changed.

    Raises:
        ValueError: work waits for each other in a circle.
    """
    left = num_works = len(order)
    turn = [0] * len(missing)
    for place, number in enumerate(order):
        turn[number] = place
    # a start, and the turn of what can start then, as one number
    heap = [ready[n] * num_works + turn[n] for n in order if not missing[n]]
    heapq.heapify(heap)
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
    if left:
        raise ValueError("the orders of the stages wait for each other in a circle")
