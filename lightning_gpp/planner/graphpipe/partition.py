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
from collections.abc import Iterator
from dataclasses import dataclass

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
from lightning_gpp.planner.graphpipe.rates import Crew, CrewRates
from lightning_gpp.planner.graphpipe.rooms import Rooms
from lightning_gpp.planner.graphpipe.siblings import Siblings
from lightning_gpp.planner.graphpipe.space import Space
from lightning_gpp.planner.graphpipe.tables import Least, Table, Tables

ROUNDING = 1 + 1e-12
FEW_ENDS = 4
"""In larger models, ends of a stage that are tried one by one, the longest first."""

NOT_POSSIBLE, TOO_MANY_DEVICES, ACCEPTED = 0, 1, 2
"""What became of a stage."""


@dataclass(frozen=True, slots=True)
class _Seat:
    """Devices of a stage.

    Attributes:
        crew: the devices.
        used: the same, to be added to others (see :class:`Usage`).
        rates: of stages on them.
    """

    crew: Crew
    used: int
    rates: CrewRates


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a stage begins.

    Attributes:
        frame: the frame.
        boundary: the element.
        room: devices that it and what follows may use.
        table: the ways of the frame.
        ways: the ways that are collected.
    """

    frame: Frame
    boundary: int
    room: int
    table: Table
    ways: list[Way]


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
        self._rooms = Rooms(space, self.limit_s)
        self.siblings = Siblings(self, space)
        self.joins = Joins(self, space, self.siblings)
        self._seats = [
            _Seat(crew, self._usage.of(crew.num_replicas, crew.kind), space.rates.of(crew))
            for crew in space.crews
        ]

    def ways(self) -> list[Way]:
        """The ways to divide the whole model."""
        root, rooms = self._space.root, self._rooms
        if rooms.of(root)[-1] < 0:
            self.too_slow(min(rooms.next_limit_s, rooms.next_work_s))
            return []
        found = self._solve(root, MODEL_END)
        self.too_slow(
            min(rooms.next_limit_s, rooms.next_work_s if self._space.is_small else math.inf)
        )
        return found

    def side(self, run: Run, behind: Way) -> list[Way]:
        """The ways to divide a branch, given what follows it.

        Their places are those of the branch of its ``Space.side_frame``.
        """
        key = run.kind, behind.need, behind.offset
        found = self._sides.get(key)
        if found is None:
            frame = self._space.side_frame(run)
            found = self._sides[key] = self._solve(frame, behind)
        return found

    def fits(self, intervals: tuple[Interval, ...], crew: Crew, units: int) -> bool:
        """Whether a stage is fast enough and finds enough memory."""
        most = self._most_in_flight(intervals, self._space.rates.of(crew))
        return self._space.in_flight(units, crew) <= most

    def _most_in_flight(self, intervals: tuple[Interval, ...], rates: CrewRates) -> float:
        """Micro-batches in flight that a stage has memory for; -1 where it is too slow."""
        rate = rates(intervals)
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
        return tables[frame.number].ways[0]

    def _fill(self, frame: Frame, end: list[Way], tables: Tables) -> None:
        """Finds the ways of a frame from its last boundary to its first."""
        table = tables[frame.number] = Table(frame, end, tables, self._usage)
        rooms = self._rooms.of(frame)
        for boundary in range(len(frame.run) - 1, -1, -1):
            room = rooms[boundary]
            if boundary in frame.run.blocks:
                self._fill_block(table, boundary, room)
            self._cut(_Start(frame, boundary, room, table, table.ways[boundary]))
            table.close(boundary)

    def _fill_block(self, table: Table, boundary: int, room: int) -> None:
        """Adds the ways in which a stage begins with a block, and fills the frames in it."""
        ways, behind = table.ways[boundary], table.ways[boundary + 1]
        for child in table.frame.children(boundary):
            self._fill(child, self._at_join(child, behind), table.tables)
            for way in table.tables[child.number].ways[0]:
                if self._usage.fits(way.used, room):
                    add_way(ways, _forked(way), self._usage)
        self._without_owner(table, boundary, room)

    def _without_owner(self, table: Table, boundary: int, room: int) -> None:
        """Adds the ways where no stage holds both a part of a block and something around it."""
        spare = room - self._rooms.fewest_apart(table.frame.run.blocks[boundary])
        for way in table.ways[boundary + 1]:
            if way is MODEL_END or self._usage.total(way.used) > spare:
                continue
            for side in self.siblings.ways(table.frame.run.blocks[boundary], way.need, way.offset):
                used = way.used + side.used
                if self._usage.fits(used, room):
                    trace = Beside(side.trace, way.trace)
                    new = Way(side.need, side.offset, used, way.beside, trace)
                    add_way(table.ways[boundary], new, self._usage)

    def _at_join(self, child: Frame, behind: list[Way]) -> list[Way]:
        """The ways at the end of an owner where a stage begins at the join."""
        ways: list[Way] = []
        room = self._rooms.of(child)[-1]
        spare = room - self._rooms.fewest_apart(child.others)
        for way in behind:
            if way is MODEL_END or self._usage.total(way.used) > spare:
                continue  # the end of a branch must come last
            for side in self.siblings.ways(child.others, way.need, way.offset):
                used = way.used + side.used
                if self._usage.fits(used, room):
                    trace = Beside(side.trace, way.trace)
                    beside = (*way.beside, side.need, side.offset)
                    add_way(ways, Way(way.need, way.offset, used, beside, trace), self._usage)
        return ways

    def _cut(self, start: _Start) -> None:
        """Adds the ways whose first stage begins at some place."""
        if self._space.is_small:
            for seat, last, _ in self._seated(start):
                for end in range(start.boundary, last + 1):
                    self._end_at(start, seat, end)
            return
        seated = self._seated(start)
        if start.frame.level == 0 and self._usage.has_one_kind:
            for seat, last, least in sorted(seated, key=lambda item: item[2]):
                if not _has_better(start.ways, least):
                    self._longest(start, seat, start.boundary, last + 1)
            return
        reached: dict[int, int] = {}  # by kind: more replicas are only worth a longer stage
        for seat, last, _ in seated:
            first = reached.get(seat.crew.kind, start.boundary)
            if first <= last:
                found = self._longest(start, seat, first, last + 1)
                reached[seat.crew.kind] = max(first, found + 1)

    def _seated(self, start: _Start) -> list[tuple[_Seat, int, Least]]:
        """Devices of a first stage, where it ends at last, and what its ways have at least."""
        table, boundary = start.table, start.boundary
        place = start.frame.run.bounds[boundary]
        spare = start.room - table.fewest
        found = []
        for seat in self._seats:
            crew = seat.crew
            if crew.num_replicas > spare:
                continue
            begin_s = seat.rates.least_seconds[place]
            path = self._space.path(crew, start.frame)
            stop = bisect_right(path, begin_s + self.limit_s, boundary)
            if stop < len(path):
                self.too_slow(path[stop] - begin_s)
            last = table.last_open(boundary, stop)
            if last < boundary:
                continue
            devices, need, offset = table.least_at[last]
            devices += crew.num_replicas
            if devices <= start.room or self._space.is_small:
                units = units_in_flight(need, offset, crew.multiple)
                least = Least(devices, units + crew.multiple, units - crew.multiple)
                found.append((seat, last, least))
        return found

    def _longest(self, start: _Start, seat: _Seat, first: int, stop: int) -> int:
        """The last end from ``first`` on, before ``stop``, that is accepted; -1 if there is none.

        Where the longest few are not possible, for want of memory, longer ones are taken to need
        more of it; where too many devices are needed, shorter stages leave even more to others.
        """
        for end in range(stop - 1, max(first, stop - FEW_ENDS) - 1, -1):
            outcome = self._end_at(start, seat, end)
            if outcome != NOT_POSSIBLE:
                return end if outcome == ACCEPTED else -1
        low, high, found = first, stop - FEW_ENDS, -1
        while low < high:
            middle = (low + high) // 2
            outcome = self._end_at(start, seat, middle)
            if outcome == NOT_POSSIBLE:
                high = middle
            else:
                low = middle + 1
                found = middle if outcome == ACCEPTED else found
        return found

    def _end_at(self, start: _Start, seat: _Seat, index: int) -> int:
        """Adds the ways whose first stage ends at a point, or in a branch behind it."""
        frame = start.frame
        point = frame.trunk[index]
        intervals = frame.stage(start.boundary, index)
        outcome = self._try(start, seat, point, intervals)
        if frame.is_fork[index]:
            path, sums = self._space.path(seat.crew, frame), seat.rates.least_seconds
            left_s = sums[frame.run.bounds[start.boundary]] + self.limit_s - path[index]
            for longer, head in self._heads(point, intervals, seat, left_s):
                outcome = max(outcome, self._try(start, seat, head, longer))
        return outcome

    def _heads(
        self, point: Point, intervals: tuple[Interval, ...], seat: _Seat, left_s: float
    ) -> Iterator[tuple[tuple[Interval, ...], Point]]:
        """Ends of a stage in the branches of the block behind a point."""
        sums = seat.rates.least_seconds
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
                    yield from self._heads(head, longer, seat, rest_s)

    def _try(
        self, start: _Start, seat: _Seat, point: Point, intervals: tuple[Interval, ...]
    ) -> int:
        """Adds the ways whose first stage is of some intervals; says what became of it."""
        space, crew, multiple = self._space, seat.crew, seat.crew.multiple
        behind = start.table.tables[point.frame.number].ways[point.boundary]
        may_grow = space.is_small and bool(point.crossed)
        most = self._most_in_flight(intervals, seat.rates)
        if not behind or (most < 1 and not may_grow):
            return NOT_POSSIBLE
        level = 2 * (start.frame.level - len(point.crossed))
        joins: dict[int, list[Join]] = {}
        spare: int | None = None
        outcome = NOT_POSSIBLE
        for way in behind:
            need, offset, total, beside, trace = way
            total += seat.used
            if not self._usage.fits(total, start.room):
                outcome = outcome or TOO_MANY_DEVICES
                continue
            if len(beside) > level:
                need = max(need, *beside[level::2])
                offset = max(offset, *beside[level + 1 :: 2])
                beside = beside[:level]
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
            if spare is None:
                spare = self._spare(start, seat, point, intervals)
            if self._usage.total(total) > spare:
                continue
            if units not in joins:
                joins[units] = self.joins.of(point.crossed, intervals, crew, units)
            for found in joins[units]:
                if self._usage.fits(total + found.used, start.room):
                    cut = Cut(found.intervals, crew, units, trace)
                    both = Beside(found.trace, cut)
                    new = Way(need, offset, total + found.used, beside + found.beside, both)
                    add_way(start.ways, new, self._usage)
        return outcome

    def _spare(
        self, start: _Start, seat: _Seat, point: Point, intervals: tuple[Interval, ...]
    ) -> int:
        """Devices that a stage with joins and what follows it may use."""
        sums = seat.rates.least_seconds
        left_s = self.limit_s - sum(sums[stop] - sums[first] for first, stop in intervals)
        beside = (
            self._rooms.fewest_beside(frame.others, seat.crew, left_s) for frame in point.crossed
        )
        return start.room - sum(beside)


def _has_better(ways: list[Way], least: Least) -> bool:
    """Whether one of some ways is nowhere worse than what others have at least."""
    devices, need, offset = least
    return any(way[0] <= need and way[1] <= offset and way[2] <= devices for way in ways)


def _forked(way: Way) -> Way:
    """A way at the beginning of an owner as one at the fork."""
    *beside, need, offset = way.beside
    return Way(max(way.need, need), max(way.offset, offset), way.used, tuple(beside), way.trace)
