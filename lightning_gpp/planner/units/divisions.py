"""Divisions of units into stages: cuts of topological orders, and small changes of a division.

The cost of a stage is its compute plus the transfers over its borders for one micro-batch. Two
dynamic programs over (stages so far, units so far): the smallest *bottleneck* (the partition of
PipeDream, SOSP 2019, section 3.1, one device per stage), and, with stages kept under a limit, the
fewest bytes over the cuts. ``O(num_stages * num_units^2)`` time.

Contiguous pieces of a topological order are convex and come in topological order, so a cut of an
order is always a valid plan. Which plans can be found depends on the order: going *depth first*
finishes a branch before it starts the next and keeps branches apart, which lets stages run in
parallel; going *breadth first* cuts across the branches, as pipelines of chains do.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_gpp.cluster import Link
from lightning_gpp.graph import FEED
from lightning_gpp.planner.units.units import UnitGraph, order_to_end

SLACKS = (1.0, 1.1, 1.3)
"""Cuts with few bytes are sought with stages up to this times the smallest bottleneck."""

StageUnits = tuple[tuple[int, ...], ...]
"""Units of each stage."""


Crossing = tuple[int, int, int]
"""Number of a value, the place that makes it, and its bytes."""


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
    count = len(order)
    place_of = {unit: place for place, unit in enumerate(order)} | {FEED: FEED}
    # Flows by the places where they are made, read, and read last: source and bytes of each.
    made: list[list[Crossing]] = [[] for _ in order]
    read: list[list[Crossing]] = [[] for _ in order]
    last_read: list[list[Crossing]] = [[] for _ in order]
    for number, flow in enumerate(units.flows):
        crossing = number, place_of[flow.source], flow.step_bytes
        readers = {place_of[target] for target in flow.targets}
        if flow.is_output:
            readers.add(count - 1)
        if flow.source != FEED:
            made[crossing[1]].append(crossing)
        for place in readers:
            read[place].append(crossing)
        last_read[max(readers)].append(crossing)
    stage_s = [[math.inf] * count for _ in range(count + 1)]
    cut_bytes = [[math.inf] * count for _ in range(count + 1)]
    for start in range(count):
        compute_s = out_bytes = in_bytes = feed_bytes = 0.0
        entered: set[int] = set()
        for place in range(start, count):
            compute_s += units.compute_s[order[place]]
            for number, source, size in read[place]:
                if source < start and number not in entered:
                    entered.add(number)
                    in_bytes += size
                    feed_bytes += size if source == FEED else 0
            out_bytes += sum(size for _, _, size in made[place])
            out_bytes -= sum(size for _, source, size in last_read[place] if source >= start)
            if place == count - 1:
                in_bytes -= feed_bytes
            transfers_s = [link.transfer_s(int(size)) for size in (in_bytes, out_bytes) if size]
            stage_s[place + 1][start] = compute_s + sum(transfers_s)
            cut_bytes[place + 1][start] = in_bytes
    return SegmentCosts(stage_s, cut_bytes)


def _pieces(order: Sequence[int], borders: Sequence[int]) -> StageUnits:
    return tuple(tuple(sorted(order[start:stop])) for start, stop in pairwise(borders))


def neighbours(units: UnitGraph, stages: StageUnits) -> Iterator[StageUnits]:
    """Valid divisions with as many stages that differ in one place.

    - One unit moves to the stage of a unit near it: a producer, a consumer, or another branch of
      the same fork or join.
    - Two stages that are joined by an edge become one, and another stage becomes two.
    """
    stage_of = [0] * len(units)
    for stage, members in enumerate(stages):
        for unit in members:
            stage_of[unit] = stage
    for changed in (*_moved(units, stages, stage_of), *_merged_and_split(units, stages, stage_of)):
        numbered = renumbered(units, changed)
        if numbered is not None:
            yield numbered


def _moved(units: UnitGraph, stages: StageUnits, stage_of: Sequence[int]) -> Iterator[list[int]]:
    for unit, home in enumerate(stage_of):
        if len(stages[home]) > 1:
            for target in sorted({stage_of[other] for other in _near(units, unit)} - {home}):
                yield [target if u == unit else stage for u, stage in enumerate(stage_of)]


def _merged_and_split(
    units: UnitGraph, stages: StageUnits, stage_of: Sequence[int]
) -> Iterator[list[int]]:
    edges = {
        (stage_of[source], stage_of[unit])
        for unit, sources in enumerate(units.predecessors)
        for source in sources
    }
    for one, other in sorted(edges):
        if one == other:
            continue
        merged = [one if stage == other else stage for stage in stage_of]
        members = [unit for unit, stage in enumerate(merged) if stage == one]
        rest = [list(group) for stage, group in enumerate(stages) if stage not in (one, other)]
        heaviest = max([members, *rest], key=lambda group: sum(units.compute_s[u] for u in group))
        for part in _parts(units, heaviest):
            yield [other if unit in part else stage for unit, stage in enumerate(merged)]


def _parts(units: UnitGraph, members: Sequence[int]) -> Iterator[frozenset[int]]:
    """Ways to split a stage in two: what to take out of it."""
    for start in range(1, len(members)):
        yield frozenset(members[start:])
    inside = frozenset(members)
    for root in members:
        branch = {root}
        for unit in members:
            if branch.intersection(units.predecessors[unit]):
                branch.add(unit)
        if frozenset(branch) != inside:
            yield frozenset(branch)


def renumbered(units: UnitGraph, stage_of: Sequence[int]) -> StageUnits | None:
    """The division with its stages in topological order, or None where that cannot be.

    Of several possible orders the one closest to the given numbers is taken; the last stage holds
    one of the final units.
    """
    num_stages = 1 + max(stage_of)
    successors: dict[int, set[int]] = {stage: set() for stage in range(num_stages)}
    for unit, sources in enumerate(units.predecessors):
        for source in sources:
            if stage_of[source] != stage_of[unit]:
                successors[stage_of[source]].add(stage_of[unit])
    order = order_to_end(successors, (stage_of[unit] for unit in units.finals))
    if order is None:
        return None
    place_of = {stage: place for place, stage in enumerate(order)}
    members: list[list[int]] = [[] for _ in range(num_stages)]
    for unit, stage in enumerate(stage_of):
        members[place_of[stage]].append(unit)
    return tuple(map(tuple, members))


def _near(units: UnitGraph, unit: int) -> set[int]:
    sources, targets = units.predecessors[unit], units.successors[unit]
    near = {*sources, *targets}
    for source in sources:
        near.update(units.successors[source])
    for target in targets:
        near.update(units.predecessors[target])
    return near


MAX_FINALS = 3
"""With several outputs, how many choices of the unit that comes last are tried."""

Edges = Sequence[Sequence[int]]


def candidate_orders(units: UnitGraph) -> list[tuple[int, ...]]:
    """Different topological orders, each ending with one of the final units."""
    orders = [
        order for final in units.finals[: -MAX_FINALS - 1 : -1] for order in _orders(units, final)
    ]
    return list(dict.fromkeys(orders))


def _orders(units: UnitGraph, final: int) -> Iterator[tuple[int, ...]]:
    sources, targets = units.predecessors, units.successors
    level = _longest_path_s(sources, [1.0] * len(units), range(len(units)))
    yield _walk(sources, targets, lambda unit, ready_since: (unit,), last=final)
    yield _walk(sources, targets, lambda unit, ready_since: (level[unit], unit), last=final)
    ahead_s = _longest_path_s(targets, units.compute_s, reversed(range(len(units))))
    behind_s = _longest_path_s(sources, units.compute_s, range(len(units)))
    for sign in (-1, 1):  # heavier branches first, lighter branches first
        yield _walk(sources, targets, _depth_first(ahead_s, sign), last=final)
        yield _walk(targets, sources, _depth_first(behind_s, sign), first=final)[::-1]


def _depth_first(weight_s: Sequence[float], sign: int) -> Callable[[int, int], tuple[float, ...]]:
    return lambda unit, ready_since: (-ready_since, sign * weight_s[unit], unit)


def _walk(
    needs: Edges,
    unlocks: Edges,
    priority: Callable[[int, int], tuple[float, ...]],
    *,
    first: int | None = None,
    last: int | None = None,
) -> tuple[int, ...]:
    """Units whose needs are met, smallest priority (of unit and time it became ready) next."""
    missing = [len(sources) for sources in needs]
    ready = {unit: 0 for unit, count in enumerate(missing) if not count}
    order: list[int] = []
    while ready:
        if first in ready:
            unit = first
        else:
            choices = (unit for unit in ready if unit != last or len(ready) == 1)
            unit = min(choices, key=lambda unit: priority(unit, ready[unit]))
        del ready[unit]
        order.append(unit)
        for target in unlocks[unit]:
            missing[target] -= 1
            if not missing[target]:
                ready[target] = len(order)
    return tuple(order)


def _longest_path_s(
    neighbours: Edges, compute_s: Sequence[float], order: Iterable[int]
) -> list[float]:
    """Seconds of the longest path from each unit on along its neighbours, itself included."""
    path_s = [0.0] * len(compute_s)
    for unit in order:
        path_s[unit] = compute_s[unit] + max((path_s[n] for n in neighbours[unit]), default=0.0)
    return path_s
