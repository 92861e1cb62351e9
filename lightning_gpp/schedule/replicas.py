"""Replicas of a stage become stages of the program, each on its own device.

A stage on ``d`` devices that takes ``k`` units at a time is divided into ``d`` replicas that take
``k / d`` consecutive units each (GraphPipe, arXiv 2406.17145, section 4: data parallelism inside
of a stage). Orders and in-flight counts are those of the whole stage; every replica follows them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.schedule.action import Action
from lightning_gpp.schedule.orders import Steps, stage_actions
from lightning_gpp.schedule.program import Replica

Devices = Sequence[int | Sequence[int]]
"""For every stage its device, or the devices of its replicas."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """The stages of a program.

    Attributes:
        replicas: which stage of the plan each is; those of one stage follow one another.
        devices: device of each.
        multiples: units in one micro-batch of each.
        edges: between them.
    """

    replicas: tuple[Replica, ...]
    devices: tuple[int, ...]
    multiples: tuple[int, ...]
    edges: tuple[StageEdge, ...]

    def orders(self, steps: Mapping[int, Steps]) -> dict[int, list[Action]]:
        """The actions of every replica in order, from the steps of its stage."""
        return {
            stage: stage_actions(stage, steps[replica.stage])
            for stage, replica in enumerate(self.replicas)
        }


def expand(stages: StageGraph, devices: Devices, multiples: Sequence[int]) -> Expansion:
    """Makes every replica a stage.

    Args:
        stages: the stage graph of the plan.
        devices: of every stage.
        multiples: units in one micro-batch of every stage, all of its replicas together.

    >>> chain = StageGraph(2, (StageEdge(0, 1, ("x",)),))
    >>> expansion = expand(chain, [(0, 1), 2], multiples=[2, 2])
    >>> expansion.multiples, [(edge.source, edge.target) for edge in expansion.edges]
    ((1, 1, 2), [(0, 2), (1, 2)])
    """
    homes = [devices_of(entry) for entry in devices]
    first = [0]
    for home in homes:
        first.append(first[-1] + len(home))
    return Expansion(
        replicas=tuple(
            Replica(stage, index, len(home))
            for stage, home in enumerate(homes)
            for index in range(len(home))
        ),
        devices=tuple(device for home in homes for device in home),
        multiples=tuple(
            multiples[stage] // len(home) for stage, home in enumerate(homes) for _ in home
        ),
        edges=tuple(
            sorted(
                (
                    replace(edge, source=source, target=target)
                    for edge in stages.edges
                    for source, target in _pairs(edge, homes, multiples, first)
                ),
                key=lambda edge: (edge.source, edge.target),
            )
        ),
    )


def devices_of(entry: int | Sequence[int]) -> tuple[int, ...]:
    """The devices of a stage, one per replica."""
    return (entry,) if isinstance(entry, int) else tuple(entry)


def _pairs(
    edge: StageEdge,
    homes: Sequence[Sequence[int]],
    multiples: Sequence[int],
    first: Sequence[int],
) -> Iterator[tuple[int, int]]:
    """The replicas at both ends of an edge that have units in common."""
    counts = (1 if edge.source == FEED else len(homes[edge.source]), len(homes[edge.target]))
    paces = (multiples[edge.source], multiples[edge.target])  # the feed goes at the loss's pace
    if counts == (1, 1):
        yield FEED if edge.source == FEED else first[edge.source], first[edge.target]
        return
    sizes = (paces[0] // counts[0], paces[1] // counts[1])
    found = set()
    unit, period = 0, math.lcm(*paces)
    while unit < period:
        source, target = (unit // size for size in sizes)
        found.add((source % counts[0], target % counts[1]))
        unit = min((source + 1) * sizes[0], (target + 1) * sizes[1])
    for source, target in sorted(found):
        start = FEED if edge.source == FEED else first[edge.source] + source
        yield start, first[edge.target] + target
