"""Merges the orders of the stages that live on one device into one order.

A device with one stage keeps that stage's order. Where several stages share a device, their
orders are merged by list scheduling with unit times (a backward takes two): the device runs
whichever of its next actions can start first. Every stage keeps its own order, so whatever the
orders guarantee still holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lightning_gpp.graph import FEED
from lightning_gpp.schedule.action import Action, Kind, unit_time_s
from lightning_gpp.schedule.program import Program


def merge_stages(program: Program, orders: Mapping[int, Sequence[Action]]) -> list[list[Action]]:
    """One order of compute actions for every device.

    Args:
        program: says where stages are and how they depend on each other; its actions are not read.
        orders: compute actions of every stage and of the feed.

    Raises:
        ValueError: the orders of the stages wait for each other in a circle.
    """
    feed_forwards = [action for action in orders[FEED] if action.kind is Kind.FORWARD]
    queues = {stage: list(order) for stage, order in orders.items()}
    queues[FEED] = [action for action in orders[FEED] if action.kind is Kind.BACKWARD]
    merged: list[list[Action]] = [[] for _ in range(1 + max(program.devices))]
    merged[program.device(FEED)] += feed_forwards
    if len(set(program.devices)) == program.num_stages and not queues[FEED]:
        for stage, queue in queues.items():
            merged[program.device(stage)] += queue
        return merged
    _list_schedule(program, queues, merged, dict.fromkeys(feed_forwards, 0.0))
    return merged


def _list_schedule(
    program: Program,
    queues: Mapping[int, list[Action]],
    merged: list[list[Action]],
    end_s: dict[Action, float],
) -> None:
    position = dict.fromkeys(queues, 0)
    free_s = [0.0] * len(merged)
    remaining = sum(map(len, queues.values()))
    while remaining:
        ready = []
        for stage, queue in queues.items():
            if position[stage] == len(queue):
                continue
            action = queue[position[stage]]
            needs = [end_s.get(need) for need in dependencies(program, action)]
            if None in needs:
                continue
            start = max([free_s[program.device(stage)], *(need for need in needs if need)])
            backward_first = action.kind is not Kind.BACKWARD
            ready.append((start, backward_first, action.microbatch, -stage, action))
        if not ready:
            raise ValueError("the orders of the stages wait for each other in a circle")
        start, *_, action = min(ready, key=lambda item: item[:-1])
        device = program.device(action.stage)
        merged[device].append(action)
        end_s[action] = free_s[device] = start + unit_time_s(action)
        position[action.stage] += 1
        remaining -= 1


def dependencies(program: Program, action: Action) -> Iterator[Action]:
    """The compute actions whose results one compute action needs."""
    if action.kind is Kind.BACKWARD:
        yield Action(action.stage, Kind.FORWARD, action.microbatch)
    size = program.multiple(action.stage)
    first, last = action.microbatch * size, (action.microbatch + 1) * size - 1
    if action.kind is Kind.FORWARD:
        sources = [edge.source for edge in program.in_edges[action.stage]]
    else:
        sources = [e.target for e in program.out_edges[action.stage] if e.has_backward]
    for source in sources:
        other = program.multiple(source)
        for microbatch in range(first // other, last // other + 1):
            yield Action(source, action.kind, microbatch)
