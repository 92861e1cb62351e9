"""All divisions into stages that are fast enough: the dynamic program of GraphPipe.

For a limit on every stage's seconds per sample, a micro-batch size and a tree, the fewest devices
for each number of micro-batches in flight at the first stage. It is the dual of ``DP`` in
algorithm 1 of GraphPipe (arXiv 2406.17145, section 5.2), which is given the devices and seeks the
fewest micro-batches in flight; like it, it goes from the end of the model to its beginning, as the
number in flight of a stage depends on the stages behind it.

Stages of this search space are

- a piece of a run: neighbouring elements, blocks only as a whole;
- such a piece with the beginning of one branch of the block behind it (it holds the *fork*), and
  with the end of one branch of the block before it (it holds the *join*); then it may hold more,
  whole, branches of that block (in larger models also the ends of others beside the join);
- some whole branches of a block together.

The stage with the fork and the one with the join take from the same branch, the *owner*.

So a join needs no stage of its own: the last layers of a branch take it in, and 32 equal layers in
branches with a cheap concatenation fill 32 stages, not 33. The stage that holds a fork or join is
the one to which this leaves the fewest devices. What lies outside this space is found by the search
on the model as a line, whose stages may hold parts of two branches.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_gpp.planner.graphpipe.frames import Frame, Point
from lightning_gpp.planner.graphpipe.frontier import (
    MODEL_END,
    Beside,
    Cut,
    Way,
    add_way,
    units_in_flight,
)
from lightning_gpp.planner.graphpipe.joins import Join, Joins
from lightning_gpp.planner.graphpipe.layout import Interval, Run, joined
from lightning_gpp.planner.graphpipe.rates import Crew
from lightning_gpp.planner.graphpipe.siblings import Siblings
from lightning_gpp.planner.graphpipe.space import Space

Tables = dict[int, list[list[Way]]]
"""Frame -> for every boundary the ways to divide what follows."""

ROUNDING = 1 + 1e-12
FEW_ENDS = 4
"""In larger models, ends of a stage that are tried one by one, the longest first."""

NOT_POSSIBLE, TOO_MANY_DEVICES, ACCEPTED = 0, 1, 2
"""What became of a stage."""


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a stage begins.

    Attributes:
        frame: the frame.
        boundary: the element.
        room: devices that it and what follows may use.
        ways: the ways that are collected.
        tables: the ways at all places behind.
    """

    frame: Frame
    boundary: int
    room: int
    ways: list[Way]
    tables: Tables


class Partition:
    """The ways that respect one limit.

    Attributes:
        limit_s: most seconds per sample of a stage.
        next_limit_s: the least limit seen so far at which a stage would be possible that this one
            forbids; no limit in between has other ways.
        siblings: the ways of branches beside owners.
        joins: the stages with joins.
    """

    def __init__(self, space: Space, limit_s: float) -> None:
        self._space = space
        self._usage = space.usage
        self.limit_s = limit_s * ROUNDING
        self.next_limit_s = math.inf
        self._sides: dict[tuple[int, int, int], list[Way]] = {}
        self.siblings = Siblings(self, space)
        self.joins = Joins(self, space, self.siblings)
        self._crews = [
            (crew, self._usage.of(crew.num_replicas, crew.kind), space.rates.least_seconds(crew))
            for crew in space.crews
        ]

    def ways(self) -> list[Way]:
        """The ways to divide the whole model."""
        return self._solve(self._space.root, MODEL_END)

    def side(self, run: Run, behind: Way) -> list[Way]:
        """The ways to divide a branch, given what follows it.

        Their places are those of another branch like it: add ``shift``.
        """
        key = run.kind, behind.need, behind.offset
        found = self._sides.get(key)
        if found is None:
            frame = self._space.side_frame(run)
            found = self._sides[key] = self._solve(frame, behind)
        return found

    def shift(self, run: Run) -> int:
        """Places from the branch that stands for a run to the run itself."""
        return run.start - self._space.side_frame(run).run.start

    def fits(self, intervals: tuple[Interval, ...], crew: Crew, units: int) -> bool:
        """Whether a stage is fast enough and finds enough memory."""
        return self._space.in_flight(units, crew) <= self._most_in_flight(intervals, crew)

    def _most_in_flight(self, intervals: tuple[Interval, ...], crew: Crew) -> float:
        """Micro-batches in flight that a stage has memory for; -1 where it is too slow."""
        rate = self._space.rates(intervals, crew)
        most = rate.most_in_flight
        if rate.seconds_per_sample > self.limit_s:
            self.too_slow(rate.seconds_per_sample)
            most = -1.0
        if rate.recomputed_seconds_per_sample <= self.limit_s:
            return max(most, rate.recomputed_most_in_flight)
        self.too_slow(rate.recomputed_seconds_per_sample)
        return most

    def too_slow(self, seconds_per_sample: float) -> None:
        """Notes what a stage takes that does not keep to the limit."""
        if seconds_per_sample < self.next_limit_s:
            self.next_limit_s = seconds_per_sample

    def _solve(self, frame: Frame, end: Way) -> list[Way]:
        tables: Tables = {}
        self._fill(frame, [end], tables)
        return tables[frame.number][0]

    def _fill(self, frame: Frame, end: list[Way], tables: Tables) -> None:
        """Finds the ways of a frame from its last boundary to its first."""
        size = len(frame.run)
        table: list[list[Way]] = [[] for _ in range(size)]
        table.append(end)
        tables[frame.number] = table
        for boundary in range(size - 1, -1, -1):
            room = self._room(frame, boundary)
            if boundary in frame.run.blocks:
                for child in frame.children(boundary):
                    self._fill(child, self._at_join(child, table[boundary + 1]), tables)
                    for way in tables[child.number][0]:
                        if self._usage.fits(way.used, room):
                            add_way(table[boundary], _forked(way), self._usage)
                self._without_owner(frame, boundary, room, table)
            self._cut(_Start(frame, boundary, room, table[boundary], tables))

    def _without_owner(
        self, frame: Frame, boundary: int, room: int, table: list[list[Way]]
    ) -> None:
        """Adds the ways where no stage holds both a part of a block and something around it."""
        for way in table[boundary + 1]:
            if way is MODEL_END:
                continue
            for side in self.siblings.ways(frame.run.blocks[boundary], way.need, way.offset):
                if self._usage.fits(way.used + side.used, room):
                    trace = Beside(side.trace, 0, way.trace)
                    used = way.used + side.used
                    new = Way(side.need, side.offset, used, way.beside, trace)
                    add_way(table[boundary], new, self._usage)

    def _at_join(self, child: Frame, behind: list[Way]) -> list[Way]:
        """The ways at the end of an owner where a stage begins at the join."""
        ways: list[Way] = []
        for way in behind:
            if way is MODEL_END:
                continue  # the end of a branch must come last
            for side in self.siblings.ways(child.others, way.need, way.offset):
                if self._usage.fits(way.used + side.used, self._usage.num_devices):
                    trace = Beside(side.trace, 0, way.trace)
                    beside = (*way.beside, side.need, side.offset)
                    new = Way(way.need, way.offset, way.used + side.used, beside, trace)
                    add_way(ways, new, self._usage)
        return ways

    def _cut(self, start: _Start) -> None:
        """Adds the ways whose first stage begins at some place."""
        space, frame, boundary = self._space, start.frame, start.boundary
        place = frame.run.bounds[boundary]
        reached: dict[int, int] = {}  # by kind: more replicas are only worth a longer stage
        for crew, used, sums in self._crews:
            path = space.path(crew, frame)
            stop_s = sums[place] + self.limit_s
            index = bisect_right(path, stop_s)
            if index < len(path):
                self.too_slow(path[index] - sums[place])
            first = max(boundary, reached.get(crew.kind, 0))
            if first >= index:
                continue
            end_at = partial(self._end_at, start, crew, used, path, stop_s)
            if space.is_small:
                for end in range(boundary, index):
                    end_at(end)
                continue
            found = self._longest(first, index, end_at)
            reached[crew.kind] = max(first, found + 1)

    def _longest(self, first: int, stop: int, end_at: Callable[[int], int]) -> int:
        """The last end from ``first`` on, before ``stop``, that is accepted; -1 if there is none.

        Where the longest few are not possible, for want of memory, longer ones are taken to need
        more of it; where too many devices are needed, shorter stages leave even more to others.
        """
        for end in range(stop - 1, max(first, stop - FEW_ENDS) - 1, -1):
            outcome = end_at(end)
            if outcome != NOT_POSSIBLE:
                return end if outcome == ACCEPTED else -1
        low, high, found = first, stop - FEW_ENDS, -1
        while low < high:
            middle = (low + high) // 2
            outcome = end_at(middle)
            if outcome == NOT_POSSIBLE:
                high = middle
            else:
                low = middle + 1
                found = middle if outcome == ACCEPTED else found
        return found

    def _end_at(
        self,
        start: _Start,
        crew: Crew,
        used: int,
        path: Sequence[float],
        stop_s: float,
        index: int,
    ) -> int:
        """Adds the ways whose first stage ends at a point, or in a branch behind it."""
        point = start.frame.trunk[index]
        intervals = _intervals(start.frame, start.frame.run.bounds[start.boundary], point)
        outcome = self._try(start, crew, used, point, intervals)
        if point.boundary in point.frame.run.blocks:
            for longer, head in self._heads(point, intervals, crew, stop_s - path[index]):
                outcome = max(outcome, self._try(start, crew, used, head, longer))
        return outcome

    def _room(self, frame: Frame, boundary: int) -> int:
        """Devices that what follows a boundary may use, so that what precedes finds some, too."""
        num_devices = self._usage.num_devices
        if not frame.is_model_end:
            return num_devices
        return int(num_devices - self._space.work_before(frame, boundary) / self.limit_s + 1e-6)

    def _heads(
        self, point: Point, intervals: tuple[Interval, ...], crew: Crew, left_s: float
    ) -> Iterator[tuple[tuple[Interval, ...], Point]]:
        """Ends of a stage in the branches of the block behind a point."""
        sums = self._space.rates.least_seconds(crew)
        for child in point.frame.children(point.boundary):
            start = child.run.start
            boundary = (
                bisect_right(child.run.bounds, sums[start] + left_s, key=sums.__getitem__) - 1
            )
            if boundary < len(child.run):
                next_s = sums[child.run.bounds[boundary + 1]] - sums[start]
                self.too_slow(next_s - left_s + self.limit_s)
            last = 0 if self._space.is_small else max(0, boundary - 1)
            for end in range(boundary, last - 1, -1):
                head = Point(child, end, (), point.crossed)
                longer = joined(intervals, (start, child.run.bounds[end])) if end else intervals
                if end:
                    yield longer, head
                if end in child.run.blocks:
                    rest_s = left_s - (sums[child.run.bounds[end]] - sums[start])
                    yield from self._heads(head, longer, crew, rest_s)

    def _try(
        self, start: _Start, crew: Crew, used: int, point: Point, intervals: tuple[Interval, ...]
    ) -> int:
        """Adds the ways whose first stage is of some intervals; says what became of it."""
        space, multiple = self._space, crew.multiple
        level = 2 * (start.frame.level - len(point.crossed))
        may_grow = space.is_small and bool(point.crossed)
        most: float | None = None
        joins: dict[int, list[Join]] = {}
        outcome = NOT_POSSIBLE
        for way in start.tables[point.frame.number][point.boundary]:
            need, offset, total, beside, trace = way
            total += used
            if not self._usage.fits(total, start.room):
                outcome = outcome or TOO_MANY_DEVICES
                continue
            if len(beside) > level:
                need = max(need, *beside[level::2])
                offset = max(offset, *beside[level + 1 :: 2])
                beside = beside[:level]
            if most is None:
                most = self._most_in_flight(intervals, crew)
            units = units_in_flight(need, offset, multiple)
            if way is MODEL_END and crew.num_replicas > 1:
                units = 2 * multiple  # the loss of replicas is computed in a stage of its own
            # With whole branches in it a stage with a join may have fewer messages, and fit.
            if not may_grow and space.in_flight(units, crew) > most:
                continue
            outcome = ACCEPTED
            need, offset = units + multiple, units - multiple
            if not point.crossed:
                new = Way(need, offset, total, beside, Cut(intervals, crew, units, trace))
                add_way(start.ways, new, self._usage)
                continue
            if units not in joins:
                joins[units] = self.joins.of(point.crossed, intervals, crew, units)
            for found in joins[units]:
                if self._usage.fits(total + found.used, start.room):
                    cut = Cut(found.intervals, crew, units, trace)
                    both = Beside(found.trace, 0, cut)
                    new = Way(need, offset, total + found.used, beside + found.beside, both)
                    add_way(start.ways, new, self._usage)
        return outcome


def _forked(way: Way) -> Way:
    """A way at the beginning of an owner as one at the fork."""
    *beside, need, offset = way.beside
    return Way(max(way.need, need), max(way.offset, offset), way.used, tuple(beside), way.trace)


def _intervals(frame: Frame, place: int, point: Point) -> tuple[Interval, ...]:
    run = frame.run
    is_own = point.frame is frame and not point.crossed
    stop = run.bounds[point.boundary if is_own else -1]
    if not point.beyond:
        return ((place, stop),)
    return joined(((place, stop),), *point.beyond)
