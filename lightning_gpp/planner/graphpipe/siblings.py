"""The branches beside the owner of a block: each cut on its own, or several whole ones together.

Light branches share a stage. With few branches all groups are tried; with many, branches are packed
from the heaviest to the lightest into the first stage that has room (first-fit decreasing).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from lightning_gpp.planner.graphpipe.frames import Frame
from lightning_gpp.planner.graphpipe.frontier import (
    NO_OFFSET,
    Beside,
    Cut,
    Trace,
    Way,
    add_way,
    units_in_flight,
)
from lightning_gpp.planner.graphpipe.layout import Interval, Run
from lightning_gpp.planner.graphpipe.rates import Crew
from lightning_gpp.planner.graphpipe.tails import end_of, fewest_devices, sparing_size

if TYPE_CHECKING:
    from lightning_gpp.planner.graphpipe.partition import Partition
from lightning_gpp.planner.graphpipe.space import Space

FEW_BRANCHES = 6
"""In small models, up to this many branches are grouped in all ways."""

Branches = tuple[tuple[int, Trace], ...]
"""(shift, stages) of each branch, as in :class:`Beside`."""


NOTHING = Way(0, NO_OFFSET, 0, (), None)
"""No branches at all: they ask for nothing to be in flight."""


@dataclass(frozen=True, slots=True)
class Sides:
    """One way to divide the branches beside an owner.

    Attributes:
        need: units in flight that a stage before them needs (see :class:`Way`); 0 without branches.
        offset: likewise.
        used: their devices.
        branches: their stages.
    """

    need: int
    offset: int
    used: int
    branches: Branches


@dataclass(frozen=True, slots=True)
class Join:
    """A stage that holds joins, with the branches before them.

    Attributes:
        intervals: places of the stage, whole branches that it took in included.
        beside: need and offset beside the owner of each join, outermost first.
        used: devices of the branches, the stage itself not counted.
        branches: their stages.
    """

    intervals: tuple[Interval, ...]
    beside: tuple[int, ...]
    used: int
    branches: Branches


class Siblings:
    """Finds, for one limit, the ways of the branches beside owners."""

    def __init__(self, partition: Partition, space: Space) -> None:
        self._partition = partition
        self._space = space
        self._found: dict[tuple[tuple[Run, ...], int, int], list[Sides]] = {}
        self._sparing: dict[tuple[int, int, int], int | None] = {}
        self._weights: dict[tuple[tuple[Run, ...], Crew], list[tuple[float, Run]]] = {}

    def ways(self, runs: tuple[Run, ...], behind: Way) -> list[Sides]:
        """The ways of some branches, given what follows them."""
        return self._ways(runs, _end(behind))

    def with_join(
        self, crossed: Sequence[Frame], intervals: tuple[Interval, ...], crew: Crew, units: int
    ) -> list[Join]:
        """A stage with joins as it is, and with whole branches taken in.

        Args:
            crossed: the frames of the owners, innermost first.
            intervals: places of the stage.
            crew: its devices.
            units: its smallest micro-batches in flight.
        """
        end = Way(units + crew.multiple, units - crew.multiple, 0, (), None)
        joins = [Join(intervals, (), 0, ())]
        for frame in reversed(crossed):
            joins = [
                Join(
                    stage,
                    (*join.beside, sides.need, sides.offset),
                    join.used + sides.used,
                    join.branches + sides.branches,
                )
                for join in joins
                for stage, left in self._joining(join.intervals, frame.others, crew, end)
                for sides in self._ways(left, end)
            ]
        if self._space.is_small:
            return [j for j in joins if self._partition.fits(j.intervals, crew, units)]
        return joins

    def _joining(
        self, intervals: tuple[Interval, ...], others: tuple[Run, ...], crew: Crew, end: Way
    ) -> Iterator[tuple[tuple[Interval, ...], tuple[Run, ...]]]:
        """A stage with branches, or ends of them, in it, and what is left of the branches."""
        units = end.need - crew.multiple
        for stage, left in self._taken_in(intervals, others, crew, units):
            yield stage, left
            if (
                not self._space.is_small
                and (ends := self._with_ends(stage, left, crew, end)) is not None
            ):
                yield ends

    def _with_ends(
        self, intervals: tuple[Interval, ...], runs: tuple[Run, ...], crew: Crew, end: Way
    ) -> tuple[tuple[Interval, ...], tuple[Run, ...]] | None:
        """A stage with the ends of branches that spare the rest of them a device."""
        units = end.need - crew.multiple
        room_s = self._partition.limit_s - self._seconds(intervals, crew)
        sparing = []
        for run in runs:
            size = self._sparing_size(run, end)
            if size is not None:
                sparing.append((self._seconds((end_of(run, size),), crew), run, size))
        stage, left = intervals, dict.fromkeys(runs)
        for end_s, run, size in sorted(sparing, key=lambda item: item[0]):
            longer = joined(stage, end_of(run, size))
            if self._has_time(end_s, room_s) and self._partition.fits(longer, crew, units):
                stage = longer
                room_s -= end_s
                left = dict.fromkeys(
                    self._space.beginnings.beginning(run, size) if one is run else one
                    for one in left
                )
        return (stage, tuple(left)) if stage != intervals else None

    def _sparing_size(self, run: Run, end: Way) -> int | None:
        key = run.kind, end.need, end.offset
        if key not in self._sparing:
            crews = {crew: self._space.rates.least_seconds(crew) for crew in self._space.crews}

            def fits(interval: Interval, crew: Crew) -> bool:
                units = units_in_flight(end.need, end.offset, crew.multiple)
                return self._partition.fits((interval,), crew, units)

            num_devices = fewest_devices(run, self._partition.limit_s, crews, fits)
            self._sparing[key] = sparing_size(num_devices)
        return self._sparing[key]

    def _taken_in(
        self,
        intervals: tuple[Interval, ...],
        others: tuple[Run, ...],
        crew: Crew,
        units: int,
    ) -> Iterator[tuple[tuple[Interval, ...], tuple[Run, ...]]]:
        """A stage with some of the branches in it, and the branches that are left."""
        yield intervals, others
        if self._space.is_small and len(others) <= FEW_BRANCHES:
            for size in range(1, len(others) + 1):
                for runs in combinations(others, size):
                    stage = joined(intervals, *(run.interval for run in runs))
                    yield stage, tuple(run for run in others if run not in runs)
            return
        stage, left = intervals, []
        room_s = self._partition.limit_s - self._seconds(intervals, crew)
        weights = self._by_weight(others, crew)
        if not weights or not self._has_time(weights[-1][0], room_s):
            return
        for run_s, run in weights:
            longer = joined(stage, run.interval) if self._has_time(run_s, room_s) else stage
            if longer != stage and self._partition.fits(longer, crew, units):
                stage = longer
                room_s -= run_s
            else:
                left.append(run)
        if stage != intervals:
            yield stage, tuple(left)

    def _ways(self, runs: tuple[Run, ...], behind: Way) -> list[Sides]:
        key = runs, behind.need, behind.offset
        found = self._found.get(key)
        if found is None:
            ways: list[Way] = []
            if self._space.is_small and len(runs) <= FEW_BRANCHES:
                self._all_groups(runs, behind, NOTHING, ways)
            else:
                self._packed(runs, behind, ways)
            found = self._found[key] = [Sides(w.need, w.offset, w.used, _branches(w)) for w in ways]
        return found

    def _all_groups(self, runs: tuple[Run, ...], behind: Way, done: Way, ways: list[Way]) -> None:
        """Every grouping of branches; the first one with any of the others."""
        if not runs:
            add_way(ways, done, self._space.usage)
            return
        first, others = runs[0], runs[1:]
        for size in range(len(others) + 1):
            for more in combinations(others, size):
                left = tuple(run for run in others if run not in more)
                for way in self._together((first, *more), behind):
                    self._all_groups(left, behind, _plus(done, way), ways)

    def _together(self, runs: tuple[Run, ...], behind: Way) -> list[Way]:
        """The ways of one branch, or of several in one stage; their traces are in place."""
        if len(runs) == 1:
            shift = self._partition.shift(runs[0])
            return [
                Way(w.need, w.offset, w.used, (), Beside(((shift, w.trace),), None))
                for w in self._partition.side(runs[0], behind)
                if w.trace is not None
            ]
        ways: list[Way] = []
        intervals = joined((), *(run.interval for run in runs))
        kinds = set()
        for crew in self._space.crews:
            units = units_in_flight(behind.need, behind.offset, crew.multiple)
            if crew.kind not in kinds and self._partition.fits(intervals, crew, units):
                kinds.add(crew.kind)
                used = self._space.usage.of(crew.num_replicas, crew.kind)
                cut = Cut(intervals, crew, units, None)
                way = Way(units + crew.multiple, units - crew.multiple, used, (), cut)
                add_way(ways, way, self._space.usage)
        return ways

    def _packed(self, runs: tuple[Run, ...], behind: Way, ways: list[Way]) -> None:
        """Branches packed into stages of one crew, for each crew; what is too heavy on its own."""
        alone: Sequence[tuple[Run, ...]] = [(run,) for run in runs]
        packings = {tuple(alone): None}  # a set that keeps its order
        together: set[int] = set()
        for crew in self._space.crews if len(runs) > 1 else ():
            if crew.kind not in together:
                groups = sorted(self._first_fit(runs, crew, behind), key=lambda one: one[0].start)
                packings[tuple(groups)] = None
                if len(groups) == 1:
                    together.add(crew.kind)
        for packing in packings:
            found = [NOTHING]
            for group in packing:
                longer: list[Way] = []
                for one in found:
                    for other in self._together(group, behind):
                        way = _plus(one, other)
                        if self._space.usage.fits(way.used, self._space.usage.num_devices):
                            add_way(longer, way, self._space.usage)
                found = longer
            for way in found:
                add_way(ways, way, self._space.usage)

    def _first_fit(self, runs: tuple[Run, ...], crew: Crew, behind: Way) -> list[tuple[Run, ...]]:
        groups: list[tuple[Run, ...]] = []
        stages: list[tuple[Interval, ...]] = []
        units = units_in_flight(behind.need, behind.offset, crew.multiple)
        rooms_s: list[float] = []
        for run_s, run in self._by_weight(runs, crew):
            for index, stage in enumerate(stages):
                if not self._has_time(run_s, rooms_s[index]):
                    continue
                longer = joined(stage, run.interval)
                if self._partition.fits(longer, crew, units):
                    stages[index] = longer
                    rooms_s[index] -= run_s
                    groups[index] = (*groups[index], run)
                    break
            else:
                stages.append((run.interval,))
                rooms_s.append(self._partition.limit_s - run_s)
                groups.append((run,))
        return groups

    def _has_time(self, more_s: float, room_s: float) -> bool:
        """Whether a stage with so much room below the limit can take so much more."""
        if more_s <= room_s:
            return True
        self._partition.too_slow(self._partition.limit_s + (more_s - room_s))
        return False

    def _seconds(self, intervals: tuple[Interval, ...], crew: Crew) -> float:
        """Seconds per sample that a stage takes at least."""
        sums = self._space.rates.least_seconds(crew)
        return sum(sums[stop] - sums[start] for start, stop in intervals)

    def _by_weight(self, runs: tuple[Run, ...], crew: Crew) -> list[tuple[float, Run]]:
        """Branches with the seconds per sample that they take at least, the heaviest first."""
        key = runs, crew
        found = self._weights.get(key)
        if found is None:
            pairs = [(self._seconds((run.interval,), crew), run) for run in runs]
            found = self._weights[key] = sorted(pairs, key=lambda pair: -pair[0])
        return found


def joined(intervals: tuple[Interval, ...], *more: Interval) -> tuple[Interval, ...]:
    """Intervals in order, those that touch as one.

    >>> joined(((0, 2), (5, 6)), (2, 3))
    ((0, 3), (5, 6))
    """
    found: list[Interval] = []
    for start, stop in sorted((*intervals, *more)):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def _end(behind: Way) -> Way:
    return Way(behind.need, behind.offset, 0, (), None)


def _plus(one: Way, other: Way) -> Way:
    assert other.trace is not None
    branches = (*_branches(one), *_branches(other))
    trace = Beside(branches, None)
    return Way(
        max(one.need, other.need),
        max(one.offset, other.offset),
        one.used + other.used,
        (),
        trace,
    )


def _branches(way: Way) -> Branches:
    if way.trace is None:
        return ()
    return way.trace.branches if isinstance(way.trace, Beside) else ((0, way.trace),)
