"""Cutting a topological order of units into contiguous stages.

The cost of a stage is its compute plus the transfers over its borders for one micro-batch. Two
dynamic programs over (stages so far, units so far): the smallest *bottleneck* (the partition of
PipeDream, SOSP 2019, section 3.1, one device per stage), and, with stages kept under a limit, the
fewest bytes over the cuts. ``O(num_stages * num_units^2)`` time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_gpp.cluster import Link
from lightning_gpp.graph import FEED
from lightning_gpp.planner.units.units import UnitGraph

SLACKS = (1.0, 1.1, 1.3)
"""Cuts with few bytes are sought with stages up to this times the smallest bottleneck."""

StageUnits = tuple[tuple[int, ...], ...]
"""Units of each stage."""


@dataclass(frozen=True, slots=True)
class SegmentCosts:
    """Costs of the contiguous pieces ``order[start:stop]``, by ``[stop][start]``.

    Attributes:
        stage_s: compute plus transfer seconds of a piece for one micro-batch.
        cut_bytes: bytes that a piece receives.
    """

    stage_s: list[list[float]]
    cut_bytes: list[list[float]]

    def slowest_s(self, borders: Sequence[int]) -> float:
        """Seconds of the slowest piece between some borders."""
        return max(self.stage_s[stop][start] for start, stop in pairwise(borders))

    def kept(self, costs: list[list[float]], limit_s: float) -> list[list[float]]:
        """Costs of the pieces that keep to a limit, and infinite ones of all others."""
        return [
            [cost if seconds <= limit_s else math.inf for cost, seconds in zip(*rows)]
            for rows in zip(costs, self.stage_s)
        ]


def contiguous_cuts(
    units: UnitGraph, order: Sequence[int], num_stages: int, link: Link
) -> Iterator[StageUnits]:
    """Good cuts of an order into exactly ``num_stages`` stages."""
    costs = segment_costs(units, order, link)
    even = [stage * len(order) // num_stages for stage in range(num_stages + 1)]
    borders = best_borders(costs.kept(costs.stage_s, costs.slowest_s(even)), num_stages, max)
    yield _pieces(order, borders)
    bottleneck_s = costs.slowest_s(borders)
    for slack in SLACKS:
        cut_bytes = costs.kept(costs.cut_bytes, bottleneck_s * slack)
        yield _pieces(order, best_borders(cut_bytes, num_stages, operator.add))


def best_borders(
    costs: Sequence[Sequence[float]],
    num_stages: int,
    combine: Callable[[float, float], float],
) -> list[int]:
    """Borders ``0 = b_0 < b_1 < … = num_units`` with the smallest combined cost of the pieces.

    Args:
        costs: ``costs[stop][start]`` of the piece from ``start`` up to (not including) ``stop``;
            infinite where there may be none.
        num_stages: number of pieces, none empty.
        combine: joins the costs of two neighbouring runs of pieces (``max`` or a sum).

    >>> work = [1, 1, 1, 3, 2]
    >>> costs = [[sum(work[start:stop]) for start in range(stop)] for stop in range(6)]
    >>> best_borders(costs, 2, max)
    [0, 3, 5]
    """
    num_units = len(costs) - 1
    best = [0.0] + [math.inf] * num_units
    choices: list[list[int]] = []
    first = [
        next((at for at, cost in enumerate(row) if cost < math.inf), at)
        for at, row in enumerate(costs)
    ]
    for stage in range(1, num_stages + 1):
        reached, choice = [math.inf] * (num_units + 1), [0] * (num_units + 1)
        for stop in range(stage, num_units - (num_stages - stage) + 1):
            start = max(stage - 1, first[stop])
            if start < stop:
                values = list(map(combine, best[start:stop], costs[stop][start:stop]))
                reached[stop] = min(values)
                choice[stop] = start + values.index(reached[stop])
        best = reached
        choices.append(choice)
    borders = [num_units]
    for choice in reversed(choices):
        borders.append(choice[borders[-1]])
    return borders[::-1]


def segment_costs(units: UnitGraph, order: Sequence[int], link: Link) -> SegmentCosts:
    """Costs of all contiguous pieces of an order.

    A value counts once where it enters a piece and once where it leaves it, however many pieces
    read it later. Outputs are read by the last unit; the feed is on the device of the last piece.
    """
    flows = _Flows(units, order)
    count = len(order)
    stage_s = [[math.inf] * count for _ in range(count + 1)]
    cut_bytes = [[math.inf] * count for _ in range(count + 1)]
    for start in range(count):
        compute_s = out_bytes = in_bytes = feed_bytes = 0.0
        entered: set[int] = set()
        for place in range(start, count):
            compute_s += units.compute_s[order[place]]
            for flow in flows.read_at[place]:
                if flows.source[flow] < start and flow not in entered:
                    entered.add(flow)
                    in_bytes += flows.step_bytes[flow]
                    feed_bytes += flows.step_bytes[flow] if flows.source[flow] == FEED else 0
            out_bytes += sum(flows.step_bytes[flow] for flow in flows.made_at[place])
            out_bytes -= sum(
                flows.step_bytes[flow]
                for flow in flows.last_read_at[place]
                if flows.source[flow] >= start
            )
            if place == count - 1:
                in_bytes -= feed_bytes
            transfers_s = [link.transfer_s(int(size)) for size in (in_bytes, out_bytes) if size]
            stage_s[place + 1][start] = compute_s + sum(transfers_s)
            cut_bytes[place + 1][start] = in_bytes
    return SegmentCosts(stage_s, cut_bytes)


class _Flows:
    """Flows by the places in an order where they are made, read, and read last."""

    def __init__(self, units: UnitGraph, order: Sequence[int]) -> None:
        place_of = {unit: place for place, unit in enumerate(order)} | {FEED: FEED}
        self.source = [place_of[flow.source] for flow in units.flows]
        self.step_bytes = [flow.step_bytes for flow in units.flows]
        self.made_at: list[list[int]] = [[] for _ in order]
        self.read_at: list[list[int]] = [[] for _ in order]
        self.last_read_at: list[list[int]] = [[] for _ in order]
        for index, flow in enumerate(units.flows):
            readers = {place_of[target] for target in flow.targets}
            if flow.is_output:
                readers.add(len(order) - 1)
            if flow.source != FEED:
                self.made_at[place_of[flow.source]].append(index)
            for place in readers:
                self.read_at[place].append(index)
            self.last_read_at[max(readers)].append(index)


def _pieces(order: Sequence[int], borders: Sequence[int]) -> StageUnits:
    return tuple(tuple(sorted(order[start:stop])) for start, stop in pairwise(borders))
