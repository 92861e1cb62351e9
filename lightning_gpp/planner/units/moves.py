"""Small changes of a division into stages: the neighbourhood of the planner's local search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_gpp.planner.units.contiguous import StageUnits
from lightning_gpp.planner.units.dag import order_to_end
from lightning_gpp.planner.units.units import UnitGraph


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
