"""The branches beside the owner of a block: each cut on its own, or several whole ones together.

Light branches share a stage. With few branches all groups are tried; with many, they are packed
(see :mod:`lightning_gpp.planner.graphpipe.packing`).
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING

from lightning_gpp.planner.graphpipe.branches import Group
from lightning_gpp.planner.graphpipe.frontier import (
    NO_OFFSET,
    Beside,
    Cut,
    Way,
    add_way,
    units_in_flight,
)
from lightning_gpp.planner.graphpipe.packing import Packing, Packings, first_fit, groups_of
from lightning_gpp.planner.graphpipe.space import Space

if TYPE_CHECKING:
    from lightning_gpp.planner.graphpipe.partition import Partition

FEW_BRANCHES = 6
"""In small models, up to this many branches are grouped in all ways."""

NOTHING = Way(0, NO_OFFSET, 0, (), None)
"""No branches at all: they ask for nothing to be in flight."""


class Siblings:
    """Finds, for one limit, the ways of the branches beside owners."""

    def __init__(self, partition: Partition, space: Space) -> None:
        self._partition = partition
        self._space = space
        self._branches = space.branches
        self._ways: dict[tuple[Group, int, int], list[Way]] = {}
        self._ways_together: dict[tuple[Group, int, int], list[Way]] = {}
        self._packings = Packings(space, partition.limit_s)

    def ways(self, runs: Group, need: int, offset: int) -> list[Way]:
        """The ways to divide some branches.

        Args:
            runs: the branches.
            need: units in flight that a stage before what follows them needs (see :class:`Way`).
            offset: likewise.
        """
        key = runs, need, offset
        found = self._ways.get(key)
        if found is None:
            found = self._ways[key] = []
            if self._space.is_small and len(runs) <= FEW_BRANCHES:
                self._all_groups(runs, need, offset, NOTHING, found)
            else:
                self._packed(runs, need, offset, found)
            self._partition.too_slow(self._packings.next_limit_s)
        return found

    def _all_groups(self, runs: Group, need: int, offset: int, done: Way, ways: list[Way]) -> None:
        """Every grouping of branches; the first one with any of the others."""
        if not runs:
            add_way(ways, done, self._space.usage)
            return
        first, others = runs[0], runs[1:]
        for size in range(len(others) + 1):
            for more in combinations(others, size):
                left = tuple(run for run in others if run not in more)
                for way in self._together((first, *more), need, offset):
                    self._all_groups(left, need, offset, _plus(done, way), ways)

    def _packed(self, runs: Group, need: int, offset: int, ways: list[Way]) -> None:
        """Branches packed into stages of one crew, for each crew."""
        most = self._most_devices(runs)
        multiples = {crew.multiple for crew in self._space.crews}
        flights = {multiple: units_in_flight(need, offset, multiple) for multiple in multiples}
        for packing in self._packings.of(runs):
            if packing.least_devices > most:
                self._partition.too_slow(self._limit_of_more_devices(runs, most))
                continue
            if self._is_beaten(packing, flights, ways):
                continue
            groups = self._with_memory(packing, runs, flights)
            for way in self._divided(groups, need, offset, most):
                add_way(ways, way, self._space.usage)

    def _most_devices(self, runs: Group) -> int:
        """Devices that branches may use, so that the rest of the model finds some, too."""
        num_devices = self._space.usage.num_devices
        return int(num_devices - self._work_beside(runs) / self._partition.limit_s + 1e-6)

    def _work_beside(self, runs: Group) -> float:
        """Device-seconds per sample of all but some branches."""
        work = self._space.work
        return work[-1] - sum(work[run.bounds[-1]] - work[run.start] for run in runs)

    def _limit_of_more_devices(self, runs: Group, most: int) -> float:
        """The limit at which branches may use one device more."""
        left = self._space.usage.num_devices - most - 1
        return self._work_beside(runs) / left if left > 0 else math.inf

    def _is_beaten(self, packing: Packing, flights: dict[int, int], ways: list[Way]) -> bool:
        """Whether a way is at least as good as any one of a packing."""
        if not self._space.usage.has_one_kind:
            return False
        fewer = [way for way in ways if way.used <= packing.least_devices]
        if not fewer:
            return False
        need = max(min(flights[m] + m for m in some) for some in packing.multiples)
        offset = max(min(flights[m] - m for m in some) for some in packing.multiples)
        return any(way.need <= need and way.offset <= offset for way in fewer)

    def _with_memory(self, packing: Packing, runs: Group, flights: dict[int, int]) -> list[Group]:
        """The groups of a packing, or others where they do not find enough memory.

        What a stage of branches holds and sends only grows with it. So the groups that are found
        by time alone are right unless one of them does not fit.
        """
        by_weight = self._branches.by_weight(runs)
        groups = groups_of(packing.stacks, by_weight)
        if packing.crew_index is None:
            return groups
        crew = self._space.crews[packing.crew_index]

        def fits(group: Group) -> bool:
            units = flights[crew.multiple]
            return self._partition.fits(self._branches.places(group), crew, units)

        if all(len(group) == 1 or fits(group) for group in groups):
            return groups
        stacks, next_limit_s = first_fit(
            self._branches.loads(runs)[packing.crew_index],
            self._partition.limit_s,
            lambda mix: fits(groups_of([(mix, 1)], by_weight)[0]),
        )
        self._partition.too_slow(next_limit_s)
        return groups_of(stacks, by_weight)

    def _divided(self, groups: list[Group], need: int, offset: int, most: int) -> list[Way]:
        """The ways of some groups."""
        usage = self._space.usage
        found = [NOTHING]
        for group in groups:
            longer: list[Way] = []
            for other in self._together(group, need, offset):
                for one in found:
                    if usage.fits(one.used + other.used, most):
                        add_way(longer, _plus(one, other), usage)
            found = longer
        return found

    def _together(self, group: Group, need: int, offset: int) -> list[Way]:
        """The ways of one branch, or of several in one stage; their traces are in place."""
        key = group, need, offset
        found = self._ways_together.get(key)
        if found is None:
            new = self._one_stage if len(group) > 1 else self._alone
            found = self._ways_together[key] = new(group, need, offset)
        return found

    def _alone(self, group: Group, need: int, offset: int) -> list[Way]:
        (run,) = group
        shift = self._partition.shift(run)
        behind = Way(need, offset, 0, (), None)
        return [
            way._replace(trace=Beside(way.trace, shift, None))
            for way in self._partition.side(run, behind)
        ]

    def _one_stage(self, group: Group, need: int, offset: int) -> list[Way]:
        ways: list[Way] = []
        places = self._branches.places(group)
        kinds = set()
        for crew in self._packings.bound(self._branches.mix(group)).fast:
            units = units_in_flight(need, offset, crew.multiple)
            if crew.kind not in kinds and self._partition.fits(places, crew, units):
                kinds.add(crew.kind)
                used = self._space.usage.of(crew.num_replicas, crew.kind)
                cut = Cut(places, crew, units, None)
                way = Way(units + crew.multiple, units - crew.multiple, used, (), cut)
                add_way(ways, way, self._space.usage)
        return ways


def _plus(one: Way, other: Way) -> Way:
    trace = Beside(other.trace, 0, one.trace)
    return Way(
        max(one.need, other.need),
        max(one.offset, other.offset),
        one.used + other.used,
        (),
        trace,
    )
