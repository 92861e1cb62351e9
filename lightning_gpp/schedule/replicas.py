"""Replicas of a stage become stages of the program, each on its own device.

A stage on ``d`` devices that takes ``k`` units at a time is divided into ``d`` replicas that take
consecutive shares of them, ``k / d`` each where nothing else is said (GraphPipe, arXiv 2406.17145,
section 4: data parallelism inside of a stage). Orders and in-flight counts are those of the whole
stage; every replica follows them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.schedule.program_parts import Replica

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


def expand(
    stages: StageGraph,
    devices: Devices,
    multiples: Sequence[int],
    shares: Sequence[Sequence[int]] | None = None,
) -> Expansion:
    """Makes every replica a stage.

    Args:
        stages: the stage graph of the plan.
        devices: of every stage.
        multiples: units in one micro-batch of every stage, all of its replicas together.
        shares: of which each replica takes so many; by default they take equally many.

    >>> chain = StageGraph(2, (StageEdge(0, 1, ("x",)),))
    >>> expansion = expand(chain, [(0, 1), 2], multiples=[2, 2])
    >>> expansion.multiples, [(edge.source, edge.target) for edge in expansion.edges]
    ((1, 1, 2), [(0, 2), (1, 2)])
    >>> expand(chain, [(0, 1), 2], multiples=[3, 3], shares=[(2, 1), (3,)]).multiples
    (2, 1, 3)
    """
    homes = [devices_of(entry) for entry in devices]
    taken = shares or [(size // len(home),) * len(home) for home, size in zip(homes, multiples)]
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
        multiples=tuple(size for sizes in taken for size in sizes),
        edges=tuple(
            sorted(
                (
                    replace(edge, source=source, target=target)
                    for edge in stages.edges
                    for source, target in _pairs(edge, taken, first)
                ),
                key=lambda edge: (edge.source, edge.target),
            )
        ),
    )


def check_shares(stage: int, shares: Sequence[int], devices: Sequence[int], multiple: int) -> None:
    """Raises ValueError where the replicas of a stage cannot take these shares."""
    if len(shares) != len(devices) or min(shares) < 1 or sum(shares) != multiple:
        raise ValueError(
            f"stage {stage}: expected one share of at least 1 for each of its {len(devices)} "
            f"devices, together {multiple} (its microbatch_multiple), got {list(shares)}"
        )


def devices_of(entry: int | Sequence[int]) -> tuple[int, ...]:
    """The devices of a stage, one per replica."""
    return (entry,) if isinstance(entry, int) else tuple(entry)


def _pairs(
    edge: StageEdge, shares: Sequence[Sequence[int]], first: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """The replicas at both ends of an edge that have units in common."""
    is_feed = edge.source == FEED  # it goes at the pace of the loss
    source = _takers((sum(shares[-1]),) if is_feed else shares[edge.source])
    target = _takers(shares[edge.target])
    units = range(math.lcm(len(source), len(target)))
    for of_source, of_target in sorted(
        {(source[u % len(source)], target[u % len(target)]) for u in units}
    ):
        yield FEED if is_feed else first[edge.source] + of_source, first[edge.target] + of_target


def _takers(shares: Sequence[int]) -> list[int]:
    """Which replica takes each unit of a piece."""
    return [replica for replica, share in enumerate(shares) for _ in range(share)]
