"""Merges the orders of the stages that live on one device into one order.

A device with one stage keeps that stage's order. Where several stages share a device, their
orders are merged by list scheduling with unit times (a unit's forward takes one, its backward two):
the device runs whichever of its next actions can start first. Every stage keeps its own order, so
whatever the orders guarantee still holds. Where all stages do all of their forwards first, so does
the device: all forwards are merged before any backward, also those that could start early.

Of several actions that can start at once, a device runs the backward first, then the lower
micro-batch, then the later stage. Where all forwards come first it runs the most urgent one: if one
unit after the other is to be done after one unit of time each, the last unit of a micro-batch says
when it is due, and the way that it has still to go (:mod:`.ways`) how much earlier it has to start.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

from lightning_gpp.graph import FEED
from lightning_gpp.schedule.action import Action, Kind, unit_time_s
from lightning_gpp.schedule.program import Program
from lightning_gpp.schedule.ways import longest_ways


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
    queues = {stage: list(order) for stage, order in orders.items()}
    queues[FEED] = [action for action in orders[FEED] if action.kind is Kind.BACKWARD]
    merged: list[list[Action]] = [[] for _ in range(1 + max(program.devices))]
    merged[program.device(FEED)] += feed_forwards
    if len(set(program.devices)) == program.num_stages and not queues[FEED]:
        for stage, queue in queues.items():
            merged[program.device(stage)] += queue
        return merged
    end_s, free_s = dict.fromkeys(feed_forwards, 0.0), [0.0] * len(merged)
    for half in _halves(queues) if program.has_halves else [queues]:
        _list_schedule(program, half, merged, end_s, free_s)
    return merged


def _halves(queues: Mapping[int, list[Action]]) -> list[dict[int, list[Action]]]:
    """The forwards of all queues, and their backwards."""
    return [
        {stage: [a for a in queue if a.kind is kind] for stage, queue in queues.items()}
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    ]


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
    ahead = {stage: _num_ahead(order) for stage, order in orders.items() if stage != FEED}
    readers = [edge.target for edge in program.out_edges[FEED]]
    ahead[FEED] = max((ahead[reader] for reader in readers), default=0)
    merged: list[list[Action]] = [[] for _ in range(1 + max(program.devices))]
    turns = [(_turn(action, ahead), action) for order in orders.values() for action in order]
    for _, action in sorted(turns, key=lambda item: item[0]):
        merged[program.device(action.stage)].append(action)
    return merged


def _num_ahead(order: Sequence[Action]) -> int:
    """Forwards that a stage does before its first backward, but one."""
    return next(i for i, action in enumerate(order) if action.kind is Kind.BACKWARD) - 1


def _turn(action: Action, ahead: Mapping[int, int]) -> tuple[int, ...]:
    """When an action's turn is; see :func:`_without_end`."""
    if action.kind is Kind.BACKWARD:
        return action.microbatch, 1, -action.stage
    turn = max(0, action.microbatch - ahead[action.stage])
    return turn, 0, int(action.stage != FEED), action.microbatch, action.stage


def _list_schedule(
    program: Program,
    queues: Mapping[int, list[Action]],
    merged: list[list[Action]],
    end_s: dict[Action, float],
    free_s: list[float],
) -> None:
    """Appends the actions of the queues to the orders of their devices.

    Args:
        program: says where stages are and how they depend on each other.
        queues: actions of every stage, in order.
        merged: order of every device so far.
        end_s: when every action in it ends.
        free_s: when every device is done with it.
    """
    candidates = _Candidates(program, queues, end_s)
    while candidates:
        start, action = candidates.pop(free_s)
        device = program.device(action.stage)
        merged[device].append(action)
        busy_s = program.num_units(action) * unit_time_s(action)
        end_s[action] = free_s[device] = start + busy_s
        candidates.done(action)
    if candidates.num_left:
        raise ValueError("the orders of the stages wait for each other in a circle")


class _Candidates:
    """The next actions of the stages: those that can start, by when they can, and the others.

    An entry of the heap may be too early when its device got busy since; it is put back then.
    """

    def __init__(
        self, program: Program, queues: Mapping[int, list[Action]], end_s: dict[Action, float]
    ) -> None:
        self._program, self._end_s = program, end_s
        self._ways = longest_ways(program.multiples, program.edges)
        self._queues = {stage: iter(queue) for stage, queue in queues.items()}
        self.num_left = sum(map(len, queues.values()))
        self._heap: list[tuple[float, float, int, int, Action]] = []
        self._waiting: dict[Action, list[Action]] = {}
        for stage in queues:
            self._next(stage)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def pop(self, free_s: Sequence[float]) -> tuple[float, Action]:
        """The action that can start first, and when."""
        while True:
            entry = heapq.heappop(self._heap)
            start, action = entry[0], entry[-1]
            now = max(start, free_s[self._program.device(action.stage)])
            if now == start:
                return start, action
            heapq.heappush(self._heap, (now, *entry[1:]))

    def done(self, action: Action) -> None:
        """Notes when an action ended: looks again at who waited for it, and at its successor."""
        self.num_left -= 1
        for other in self._waiting.pop(action, ()):
            self._look_at(other)
        self._next(action.stage)

    def _next(self, stage: int) -> None:
        action = next(self._queues[stage], None)
        if action is not None:
            self._look_at(action)

    def _look_at(self, action: Action) -> None:
        start = 0.0
        for need in dependencies(self._program, action):
            if need not in self._end_s:
                self._waiting.setdefault(need, []).append(action)
                return
            start = max(start, self._end_s[need])
        heapq.heappush(self._heap, (start, *self._urgency(action), -action.stage, action))

    def _urgency(self, action: Action) -> tuple[float, int]:
        """Less is more urgent."""
        if not self._program.has_halves:
            return action.kind is not Kind.BACKWARD, action.microbatch
        left = self._ways.forward if action.kind is Kind.FORWARD else self._ways.backward
        way = 0 if action.stage == FEED else left[action.stage]
        return self._program.units(action.stage, action.microbatch).stop - way, action.microbatch


def dependencies(program: Program, action: Action) -> Iterator[Action]:
    """The compute actions whose results one compute action needs."""
    is_forward = action.kind is Kind.FORWARD
    if not is_forward:
        yield Action(action.stage, Kind.FORWARD, action.microbatch)
    edges = program.in_edges if is_forward else program.out_edges
    for edge in edges[action.stage]:
        if is_forward or edge.has_backward:
            parts = program.parts[edge.source, edge.target]
            for index in program.message_range(edge, action.stage, action.microbatch):
                other = edge.source if is_forward else edge.target
                yield Action(other, action.kind, parts[index].microbatch(of_source=is_forward))
