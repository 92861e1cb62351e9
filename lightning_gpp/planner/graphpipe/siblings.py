"""The branches beside the owner of a block: each cut on its own, or several whole ones together.

Light branches share a stage. With few branches all groups are tried; with many, they are packed
(see :mod:`lightning_gpp.planner.graphpipe.packing`).
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from lightning_gpp.planner.graphpipe.frontier import (
    NO_OFFSET,
    Beside,
    Cut,
    Way,
    add_way,
    units_in_flight,
)
from lightning_gpp.planner.graphpipe.packing import Group, first_fit
from lightning_gpp.planner.graphpipe.rates import Crew
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
        self._groups_by_time: dict[tuple[Group, Crew], tuple[Group, ...]] = {}

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
        """Branches packed into stages of one crew, for each crew; what is too heavy on its own."""
        alone: tuple[Group, ...] = tuple((run,) for run in runs)
        packings = {alone: None}  # a set that keeps its order
        together: set[int] = set()
        for crew in self._space.crews if len(runs) > 1 else ():
            if crew.kind not in together:
                units = units_in_flight(need, offset, crew.multiple)
                groups = self._groups(runs, crew, units)
                packings[groups] = None
                if len(groups) == 1:
                    together.add(crew.kind)
        for packing in packings:
            for way in self._divided(packing, need, offset):
                add_way(ways, way, self._space.usage)

    def _divided(self, packing: tuple[Group, ...], need: int, offset: int) -> list[Way]:
        """The ways of some groups."""
        usage = self._space.usage
        found = [NOTHING]
        for group in packing:
            longer: list[Way] = []
            for other in self._together(group, need, offset):
                for one in found:
                    if usage.fits(one.used + other.used, usage.num_devices):
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
        for crew in self._space.crews:
            if crew.kind in kinds or not self._is_fast(group, crew):
                continue
            units = units_in_flight(need, offset, crew.multiple)
            if self._partition.fits(places, crew, units):
                kinds.add(crew.kind)
                used = self._space.usage.of(crew.num_replicas, crew.kind)
                cut = Cut(places, crew, units, None)
                way = Way(units + crew.multiple, units - crew.multiple, used, (), cut)
                add_way(ways, way, self._space.usage)
        return ways

    def _is_fast(self, group: Group, crew: Crew) -> bool:
        """Whether a stage of some branches keeps to the limit but for its messages."""
        seconds = sum(self._branches.seconds(run, crew) for run in group)
        if seconds > self._partition.limit_s:
            self._partition.too_slow(seconds)
            return False
        return True

    def _groups(self, runs: Group, crew: Crew, units: int) -> tuple[Group, ...]:
        """Branches packed into stages of a crew.

        What a stage of branches holds and sends only grows with it. So the groups that are found
        by time alone are right unless one of them does not fit.
        """
        groups = self._by_time(runs, crew)

        def fits(group: Group) -> bool:
            return self._partition.fits(self._branches.places(group), crew, units)

        if all(len(group) == 1 or fits(group) for group in groups):
            return groups
        weights = self._branches.by_weight(runs, crew)
        groups, next_limit_s = first_fit(weights, self._partition.limit_s, fits)
        self._partition.too_slow(next_limit_s)
        return tuple(sorted(groups, key=lambda group: group[0].start))

    def _by_time(self, runs: Group, crew: Crew) -> tuple[Group, ...]:
        found = self._groups_by_time.get((runs, crew))
        if found is None:
            weights = self._branches.by_weight(runs, crew)
            groups, next_limit_s = first_fit(weights, self._partition.limit_s)
            self._partition.too_slow(next_limit_s)
            found = tuple(sorted(groups, key=lambda group: group[0].start))
            self._groups_by_time[runs, crew] = found
        return found


def _plus(one: Way, other: Way) -> Way:
    trace = Beside(other.trace, 0, one.trace)
    return Way(
        max(one.need, other.need),
        max(one.offset, other.offset),
        one.used + other.used,
        (),
        trace,
    )
