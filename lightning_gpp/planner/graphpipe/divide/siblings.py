"""The branches beside the owner of a block: each cut on its own, or several whole ones together.

Light branches share a stage. With few branches in small models all groups are tried; otherwise they
are packed, first-fit decreasing: from the heaviest to the lightest, each goes into the first stage
that has room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from lightning_gpp.planner.graphpipe.divide.frontier import (
    NO_OFFSET,
    Beside,
    Cut,
    Moved,
    Trace,
    Way,
    add_way,
    units_in_flight,
)
from lightning_gpp.planner.graphpipe.divide.limit import Limit
from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.layout import ElementRun, Interval, joined
from lightning_gpp.planner.graphpipe.space.space import Space

FEW_BRANCHES = 5
"""Of so many branches all groups are tried in small models: there are 52."""

NOTHING = Way(0, NO_OFFSET, 0, (), None)
"""No branches at all: they ask for nothing to be in flight."""

Group = tuple[ElementRun, ...]
"""Whole branches of one block, in one stage where there are several."""


class Siblings:
    """Finds, for one limit, the ways of the branches beside owners.

    Args:
        space: what may be chosen.
        limit: most seconds per sample of a stage.
        side: the ways to divide one branch, given what follows it.
    """

    def __init__(
        self, space: Space, limit: Limit, side: Callable[[ElementRun, Way], list[Way]]
    ) -> None:
        self._space = space
        self._limit = limit
        self._side = side
        self._ways: dict[tuple[Group, int, int], list[Way]] = {}
        self._packed: dict[tuple[Group, Crew], list[Group]] = {}

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
            behind = Way(need, offset, 0, (), None)
            for groups in dict.fromkeys(self._groupings(runs, behind)):
                for way in self._beside_each_other(groups, behind):
                    add_way(found, way, self._space.usage)
        return found

    def _groupings(self, runs: Group, behind: Way) -> Iterator[tuple[Group, ...]]:
        """How branches may share stages."""
        if self._space.is_small and len(runs) <= FEW_BRANCHES:
            yield from _all_groups(runs)
            return
        yield tuple((run,) for run in runs)
        for crew in self._space.crews if len(runs) > 1 else ():
            groups = self._fitted(runs, crew)
            units = units_in_flight(behind.need, behind.offset, crew.multiple)
            if not all(len(one) == 1 or self._fits(one, crew, units) for one in groups):
                groups = self._first_fit(runs, crew, units)
            yield tuple(groups)

    def _fitted(self, runs: Group, crew: Crew) -> list[Group]:
        """Branches packed by time alone: what several hold only grows with their number."""
        found = self._packed.get((runs, crew))
        if found is None:
            found = self._packed[runs, crew] = self._first_fit(runs, crew, None)
        return found

    def _first_fit(self, runs: Group, crew: Crew, units: int | None) -> list[Group]:
        """Branches in the first stage that has room, and with ``units`` in flight memory, too."""
        seconds = {run: self._space.seconds((run.interval,), crew) for run in runs}
        groups: list[tuple[Group, float]] = []
        for run in sorted(runs, key=lambda run: -seconds[run]):
            for index, (group, room_s) in enumerate(groups):
                if seconds[run] > room_s:
                    self._limit.too_slow(self._limit.limit_s + seconds[run] - room_s)
                elif units is None or self._fits((*group, run), crew, units):
                    groups[index] = (*group, run), room_s - seconds[run]
                    break
            else:
                groups.append(((run,), self._limit.limit_s - seconds[run]))
        return [group for group, _ in groups]

    def _fits(self, group: Group, crew: Crew, units: int) -> bool:
        return self._limit.fits(places_of(group), crew, units)

    def _beside_each_other(self, groups: Sequence[Group], behind: Way) -> list[Way]:
        """The ways of some groups."""
        usage = self._space.usage
        found = [NOTHING]
        for group in groups:
            longer: list[Way] = []
            for option in self._options(group, behind):
                for one in found:
                    used = one.used + option.used
                    if usage.fits(used, usage.num_devices):
                        need, offset = max(one.need, option.need), max(one.offset, option.offset)
                        trace = Beside(option.trace, one.trace)
                        add_way(longer, Way(need, offset, used, (), trace), usage)
            found = longer
        return found

    def _options(self, group: Group, behind: Way) -> Iterator[Way]:
        """The ways of one branch, or of several in one stage."""
        if len(group) == 1:
            shift = group[0].start - self._space.side_frame(group[0]).run.start
            for way in self._side(group[0], behind):
                assert way.trace is not None
                yield way._replace(trace=Moved(way.trace, shift) if shift else way.trace)
            return
        places, kinds = places_of(group), set()
        for crew in self._space.crews:
            units = units_in_flight(behind.need, behind.offset, crew.multiple)
            if crew.kind not in kinds and self._limit.fits(places, crew, units):
                if not self._space.is_small:
                    kinds.add(crew.kind)  # more replicas do no more than fewer that do
                used = self._space.usage.of(crew.num_replicas, crew.kind)
                cut: Trace = Cut(places, crew, units, None)
                yield Way(units + crew.multiple, units - crew.multiple, used, (), cut)


def places_of(group: Group) -> tuple[Interval, ...]:
    """All places of some branches."""
    return joined((), *(run.interval for run in group))


def _all_groups(runs: Group) -> Iterator[tuple[Group, ...]]:
    """Every grouping of branches; the first one with any of the others."""
    if not runs:
        yield ()
        return
    first, others = runs[0], runs[1:]
    for size in range(len(others) + 1):
        for more in combinations(others, size):
            left = tuple(run for run in others if run not in more)
            for rest in _all_groups(left):
                yield ((first, *more), *rest)
