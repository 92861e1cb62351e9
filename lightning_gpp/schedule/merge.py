"""Merges the orders of the stages that live on one device into one order.

A device with one stage keeps that stage's order. Where several stages share a device, their
orders are merged by list scheduling with unit times (a unit's forward takes one, its backward two):
the device runs whichever of its next actions can start first. Every stage keeps its own order, so
whatever the orders guarantee still holds. Where all stages do all of their forwards first, so does
the device: all forwards are merged before any backward, also those that could start early.

Of several actions that can start at once, a device runs the backward first, then the lower
micro-batch, then the later stage. Where all forwards come first it runs the most urgent one: if one
unit after the other is to be done at some pace, the last unit of a micro-batch says when it is due,
and the path that it has still to go (:mod:`.path_lengths`) how much earlier it has to start. Of two
paces, one unit of time and what the busiest device needs, the one that ends earlier is taken: the
first keeps later devices fed where stages take turns on them, the second lets a device with many
stages finish what it has begun.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_gpp.graph import FEED
from lightning_gpp.schedule.action import BACKWARD_UNITS, FORWARD_UNITS, Action, Kind
from lightning_gpp.schedule.list_schedule import ListSchedule, Queues
from lightning_gpp.schedule.orders import Steps
from lightning_gpp.schedule.path_lengths import PathLengths, path_lengths
from lightning_gpp.schedule.program import Program


def merge_stages(program: Program, orders: Mapping[int, Sequence[Action]]) -> list[list[Action]]:
    """One order of compute actions for every device.

    Args:
        program: says where stages are and how they depend on each other; its actions are not read.
        orders: compute actions of every stage and of the feed.

    Raises:
        ValueError: the orders of the stages wait for each other in a circle.
    """
    if not program.schedule.flushes:
        return _without_end(program, orders)
    feed_forwards = [action for action in orders[FEED] if action.kind is Kind.FORWARD]
    feed_backwards = [action for action in orders[FEED] if action.kind is Kind.BACKWARD]
    merged: list[list[Action]] = [[] for _ in range(1 + max(program.devices))]
    merged[program.device(FEED)] += feed_forwards
    if len(set(program.devices)) == program.num_stages and not feed_backwards:
        for stage, order in orders.items():
            if stage != FEED:
                merged[program.device(stage)] += order
        return merged
    numbered = _Numbered(program, {**orders, FEED: feed_backwards})
    for line, numbers in zip(merged, numbered.merged(len(merged))):
        line += map(numbered.actions.__getitem__, numbers)
    return merged


class _Numbered:
    """The compute actions of a program as numbers.

    Args:
        program: says where stages are and how they depend on each other.
        orders: compute actions of every stage, and the backwards of the feed.

    Attributes:
        actions: by number.
    """

    def __init__(self, program: Program, orders: Mapping[int, Sequence[Action]]) -> None:
        self._program = program
        self._queues: list[StageQueue] = []
        self._first: dict[int, int] = {}
        self.actions: dict[int, Action] = {}
        first = 0
        for stage in (*range(program.num_stages), FEED):
            count = program.stage_microbatches(stage)
            units = program.units(stage, 0)
            piece = program.num_microbatches // count
            is_forward = [(action.kind is Kind.FORWARD, action) for action in orders[stage]]
            steps = tuple(a.microbatch if ahead else ~a.microbatch for ahead, a in is_forward)
            device = program.device(stage)
            queue = StageQueue(device, steps, first, count, len(units), piece, units.start)
            self.actions |= zip(queue.works(), orders[stage])
            self._queues.append(queue)
            self._first[stage] = first
            first += 2 * count
        self._num_works = first

    def merged(self, num_devices: int) -> list[list[int]]:
        """The order of every device."""
        program = self._program
        lengths = path_lengths(program.multiples, program.edges) if program.has_halves else None
        return merge_queues(
            self._queues, self._needs(), lengths, num_devices=num_devices, num_works=self._num_works
        )

    def _needs(self) -> Iterator[tuple[int, int]]:
        """Pairs of work of which the first needs the second; no messages of the feed."""
        for pair, parts in self._program.parts.items():
            source, target = (self._first[stage] for stage in pair)
            has_backward = self._program.has_backward and self._program.edge[pair].has_backward
            source_count, target_count = map(self._program.stage_microbatches, pair)
            for part in parts:
                there, here = part.source_microbatch, part.target_microbatch
                if pair[0] != FEED:
                    yield target + here, source + there
                if has_backward:
                    yield source + source_count + there, target + target_count + here


def _without_end(program: Program, orders: Mapping[int, Sequence[Action]]) -> list[list[Action]]:
    """Where the pipeline does not drain a device's order is the same for every mini-batch.

    After the forwards that are ahead come the backwards, later stages first; the feed is as far
    ahead as whoever reads it. That runs to its end: what an action needs of others comes in an
    earlier turn, or before it in the order in which every device takes the actions of a turn.

    Raises:
        ValueError: stages take different numbers of units at a time.
    """
    replicas = [program.replica(stage).count for stage in range(program.num_stages)]
    if len(set(program.multiples)) > 1 or max(replicas) > 1:
        raise ValueError(
            f"the schedule {program.schedule.name!r} needs stages of one micro-batch size, without "
            f"replicas: got micro-batches of {list(program.multiples)} units, replicas {replicas}"
        )
    ahead = {
        stage: num_ahead([action.kind is Kind.FORWARD for action in order])
        for stage, order in orders.items()
        if stage != FEED
    }
    readers = [edge.target for edge in program.out_edges[FEED]]
    ahead[FEED] = max((ahead[reader] for reader in readers), default=0)
    merged: list[list[Action]] = [[] for _ in range(1 + max(program.devices))]
    turns = [
        (turn(a.stage, a.microbatch, ahead[a.stage], is_forward=a.kind is Kind.FORWARD), a)
        for order in orders.values()
        for a in order
    ]
    for _, action in sorted(turns, key=lambda item: item[0]):
        merged[program.device(action.stage)].append(action)
    return merged


def num_ahead(are_forwards: Sequence[bool]) -> int:
    """Forwards that a stage does before its first backward, but one."""
    return are_forwards.index(False) - 1


def turn(stage: int, microbatch: int, ahead: int, *, is_forward: bool) -> tuple[int, ...]:
    """When a step's turn is where the pipeline does not drain.

    Args:
        stage: of the step.
        microbatch: of the step.
        ahead: mini-batches that the stage is ahead of its backward.
        is_forward: whether it is a forward.
    """
    if not is_forward:
        return microbatch, 1, -stage
    return max(0, microbatch - ahead), 0, int(stage != FEED), microbatch, stage


@dataclass(frozen=True, slots=True)
class StageQueue:
    """The steps of a stage of a program, or of the feed, as numbered work.

    Attributes:
        device: where it runs.
        steps: its forwards and backwards in order; of the feed the backwards alone.
        first: number of its first forward; the others follow, then the backwards.
        num_microbatches: how many forwards there are.
        units: in one of its micro-batches.
        piece: units between the first ones of two micro-batches.
        start: first unit of its first micro-batch.
    """

    device: int
    steps: Steps
    first: int
    num_microbatches: int
    units: int
    piece: int
    start: int = 0

    def works(self) -> list[int]:
        """The numbers of its steps in order."""
        first, back = self.first, self.first + self.num_microbatches
        return [first + step if step >= 0 else back + ~step for step in self.steps]


def merge_queues(
    queues: Sequence[StageQueue],
    needs: Iterable[tuple[int, int]],
    lengths: PathLengths | None,
    *,
    num_devices: int,
    num_works: int,
) -> list[list[int]]:
    """The order of numbered work on every device.

    Args:
        queues: of all stages, and last of the feed.
        needs: which work needs which other, those in one queue left out.
        lengths: where all forwards come first, of the paths behind the stages; otherwise None.
        num_devices: how many devices there are.
        num_works: more than all numbers.

    Raises:
        ValueError: the orders of the stages wait for each other in a circle.
    """
    works = [queue.works() for queue in queues]
    units = _units(queues, works, num_works)
    missing = [0] * num_works
    users: list[tuple[int, ...]] = [()] * num_works
    for user, needed in needs:
        missing[user] += 1
        users[needed] += (user,)
    devices = [queue.device for queue in queues]
    halves = [works]
    if lengths is not None:
        halves = [
            [
                [number for step, number in zip(queue.steps, own) if (step < 0) == is_back]
                for queue, own in zip(queues, works)
            ]
            for is_back in (False, True)
        ]
    found: list[ListSchedule] = []
    for pace in _paces(queues) if lengths is not None else (1,):
        urgency = _urgency(queues, works, lengths, num_works, pace)
        left = missing.copy()
        found.append(ListSchedule(num_devices, num_works))
        for numbers in halves:
            found[-1].add(Queues(numbers, devices, units, urgency, left, users))
    return min(found, key=lambda merged: merged.end).lines


def _units(
    queues: Sequence[StageQueue], works: Sequence[Sequence[int]], num_works: int
) -> list[int]:
    """How long every piece of work takes; the feed's takes no time."""
    found = [0] * num_works
    for queue, own in zip(queues[:-1], works):
        forward, backward = queue.units * FORWARD_UNITS, queue.units * BACKWARD_UNITS
        for step, number in zip(queue.steps, own):
            found[number] = forward if step >= 0 else backward
    return found


def _urgency(
    queues: Sequence[StageQueue],
    works: Sequence[Sequence[int]],
    lengths: PathLengths | None,
    num_works: int,
    pace: int,
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
        for step, number in zip(queue.steps, works[position]):
            is_back = step < 0
            turn_of = done[is_back]
            done[is_back] += 1
            first = int(not is_back)
            if lengths is not None:
                last = turn_of * queue.piece + queue.start + queue.units
                first = last * pace - behind[is_back]
            key = (first * num_works + turn_of) * (num_queues + 2) + num_queues - place
            found[number] = key
    return found


def _paces(queues: Sequence[StageQueue]) -> list[int]:
    """Units of time after which one unit may follow the other: one, or what a device needs."""
    busy: dict[int, float] = {}
    for queue in queues[:-1]:
        busy[queue.device] = busy.get(queue.device, 0.0) + queue.units / queue.piece
    return sorted({1, math.ceil(max(busy.values()))})
