"""Topological orders of units that are worth cutting into contiguous stages.

Contiguous pieces of a topological order are convex and come in topological order, so a cut of an
order is always a valid plan. Which plans can be found depends on the order: going *depth first*
finishes a branch before it starts the next and keeps branches apart, which lets stages run in
parallel; going *breadth first* cuts across the branches, as pipelines of chains do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from lightning_gpp.planner.units.units import UnitGraph

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
    level = _levels(sources)
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


def _levels(sources: Edges) -> list[int]:
    """Number of units on the longest path that leads to each unit."""
    level = [0] * len(sources)
    for unit, before in enumerate(sources):
        level[unit] = 1 + max((level[source] for source in before), default=-1)
    return level
