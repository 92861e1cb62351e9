"""Plans without any search: units dealt to equal groups of devices in depth-first order.

A plan is a map from units to groups of devices; its stages follow from it: units of one group that
wait for the same stages of other groups are one stage. So no unit waits for what it does not need,
and a join beside a branch is a stage of its own on the same devices.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from operator import itemgetter

from lightning_gpp.planner.graphpipe.place.climb import FIRST_PATIENCE
from lightning_gpp.planner.graphpipe.place.draft import Draft, DraftStage, Units
from lightning_gpp.planner.graphpipe.place.judged import DraftJudge
from lightning_gpp.planner.graphpipe.place.redealt import balanced
from lightning_gpp.planner.graphpipe.place.unit_tables import UnitTables, places


def best_deals(judge: DraftJudge, *, may_share: bool = True) -> list[tuple[float, Draft]]:
    """The most promising deals of every number of replicas, with lower bounds of their steps.

    Where stages may share devices, those on all devices and on fewer count apart, so that neither
    take the places of the others.

    Args:
        judge: looks at them.
        may_share: whether stages may have devices in common.
    """
    num_devices = judge.tables.request.num_devices
    found: dict[tuple[int, bool], list[tuple[float, Draft]]] = {}
    for draft in deals(judge.tables, may_share=may_share):
        uses_all = may_share and draft.num_devices == num_devices
        some = found.setdefault((draft.stages[0].num_replicas, uses_all), [])
        limit_s = some[-1][0] if len(some) == FIRST_PATIENCE else math.inf
        for one in judge.promising([draft], limit_s):
            insort(some, one, key=itemgetter(0))
            del some[FIRST_PATIENCE:]
    return sorted(chain.from_iterable(found.values()), key=itemgetter(0))


def deals(tables: UnitTables, *, may_share: bool = True) -> Iterator[Draft]:
    """Equal work for groups of 1, 2, 4, … devices, with every size of micro-batches.

    On all devices, and on a half, a quarter, … of them: on many devices there may be too little
    work for all.

    Args:
        tables: of the units.
        may_share: whether a group has the stages that follow from its units; otherwise it has one.
    """
    request = tables.request
    for replicas, num_groups in groupings(tables):
        maps = [
            equal_groups(tables, num_groups),
            packed_branches(tables, num_groups),
            equal_groups(tables, num_groups, tables.model_order),
        ]
        for groups in dict.fromkeys(map(tuple, maps)):
            pieces = followed(groups, tables) if may_share else runs(groups)
            for size in request.microbatch_sizes:
                stages = [
                    DraftStage(units, tuple(range(at * replicas, (at + 1) * replicas)), replicas)
                    for at, units in pieces
                ]
                num_microbatches = round(request.minibatch_size / size) * replicas
                yield Draft(tuple(stages), num_microbatches)


def groupings(tables: UnitTables) -> Iterator[tuple[int, int]]:
    """Replicas, and how many groups of so many devices: not many more than there are units."""
    request = tables.request
    for replicas in request.replica_counts(request.num_devices):
        num_groups = request.num_devices // replicas
        while num_groups:
            if num_groups < 2 * tables.num_units:
                yield replicas, num_groups
            num_groups //= 2


def equal_groups(
    tables: UnitTables, num_groups: int, order: Sequence[int] | None = None
) -> list[int]:
    """The group of every unit: the order cut into runs of equal work.

    Args:
        tables: of the units.
        num_groups: how many groups there are.
        order: of the units; depth first if not given.
    """
    total_s = sum(tables.compute_s)
    groups, done_s = [0] * tables.num_units, 0.0
    for at in order or range(tables.num_units):
        unit_s = tables.compute_s[at]
        middle = (done_s + unit_s / 2) / total_s if total_s else 0.0
        groups[at] = min(num_groups - 1, int(middle * num_groups))
        done_s += unit_s
    return groups


def packed_branches(tables: UnitTables, num_groups: int) -> list[int]:
    """The same with whole branches, long ones cut: the longest first to the least busy group."""
    compute_s = tables.compute_s
    atoms: list[list[int]] = []
    for branch in branches(tables):
        own_s = sum(compute_s[at] for at in branch)
        num_parts = max(1, round(own_s * num_groups / sum(compute_s))) if own_s else 1
        atoms += _cut(branch, compute_s, min(num_parts, len(branch)))
    busy_s, home = [0.0] * num_groups, [0] * tables.num_units
    for atom in sorted(atoms, key=lambda one: -sum(compute_s[at] for at in one)):
        group = busy_s.index(min(busy_s))
        busy_s[group] += sum(compute_s[at] for at in atom)
        for at in atom:
            home[at] = group
    return home


def branches(tables: UnitTables) -> list[list[int]]:
    """The depth-first order cut where a unit does not read from the one before it alone."""
    found: list[list[int]] = []
    for at, needs in enumerate(tables.needs):
        if not at or needs != 1 << (at - 1):
            found.append([])
        found[-1].append(at)
    return found


def _cut(branch: list[int], seconds: Sequence[float], num_parts: int) -> Iterator[list[int]]:
    """A branch in parts of equal work."""
    borders = balanced([[*accumulate((seconds[at] for at in branch), initial=0.0)]] * num_parts)
    assert borders is not None  # there are as many units
    for start, stop in pairwise(borders):
        yield branch[start:stop]


def runs(groups: Sequence[int]) -> list[tuple[int, Units]]:
    """Every group with all of its units, which follow one another."""
    found: dict[int, Units] = {}
    for at, group in enumerate(groups):
        found[group] = found.get(group, 0) | 1 << at
    return list(found.items())


def followed(groups: Sequence[int], tables: UnitTables) -> list[tuple[int, Units]]:
    """The stages of a map: (group, units) of each, none before those that it reads from.

    Args:
        groups: of every unit.
        tables: of the units.
    """
    waits: list[int] = []  # stages of other groups that a unit waits for, one bit each
    stage_of: list[int] = []
    stages: dict[tuple[int, int], int] = {}
    found: list[tuple[int, Units]] = []
    for at, group in enumerate(groups):
        above = 0
        for source in places(tables.needs[at]):
            above |= waits[source]
            if groups[source] != group:
                above |= 1 << stage_of[source]
        stage = stages.setdefault((group, above), len(stages))
        if stage == len(found):
            found.append((group, 0))
        found[stage] = group, found[stage][1] | 1 << at
        waits.append(above)
        stage_of.append(stage)
    return found
