"""The ways of a place by their first stage: which devices it has, and where it ends.

Stages are as long as the limit allows, as far as memory and devices allow it, too. In a frame
without blocks, most places are never reached by such stages, and are left out until a shorter
stage asks for them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

from lightning_gpp.planner.graphpipe.divide.frontier import (
    MODEL_END,
    Beside,
    Cut,
    Way,
    add_way,
    units_in_flight,
)
from lightning_gpp.planner.graphpipe.divide.joins import Join, Joins
from lightning_gpp.planner.graphpipe.divide.limit import Limit
from lightning_gpp.planner.graphpipe.divide.others import Others
from lightning_gpp.planner.graphpipe.divide.rooms import Rooms
from lightning_gpp.planner.graphpipe.divide.tables import NO_WAYS, Table
from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.frames import EndPoint, Frame
from lightning_gpp.planner.graphpipe.space.layout import Interval, joined
from lightning_gpp.planner.graphpipe.space.rates import CrewRates
from lightning_gpp.planner.graphpipe.space.space import Space

FEW_ENDS = 4
"""In larger models, ends of a stage that are tried one by one, the longest first."""

MOST_SPARSE = 60
"""Frames of more elements are filled from their last boundary to their first."""

NOT_POSSIBLE, TOO_MANY_DEVICES, ACCEPTED = 0, 1, 2
"""What became of a stage."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Devices of a stage.

    Attributes:
        crew: the devices.
        num_replicas: how many.
        multiple: their micro-batch, in units of the smallest one.
        used: the devices, to be added to others (see :class:`Usage`).
        rates: of stages on them.
    """

    crew: Crew
    num_replicas: int
    multiple: int
    used: int
    rates: CrewRates


@dataclass(slots=True)
class _Start:
    """Where a stage begins.

    Attributes:
        table: the ways of the frame.
        frame: the frame.
        boundary: the element.
        room: devices that it and what follows may use.
        ways: the ways that are collected.
    """

    table: Table
    frame: Frame
    boundary: int
    room: int
    ways: list[Way]


class FirstStages:
    """Finds, for one limit, the ways of one place after the other.

    Args:
        space: what may be chosen.
        limit: most seconds per sample of a stage.
        rooms: the devices that are left for what follows a boundary.
        others: the fewest devices of branches beside owners.
        joins: the stages with joins.
    """

    def __init__(
        self, space: Space, limit: Limit, rooms: Rooms, others: Others, joins: Joins
    ) -> None:
        self._limit = limit
        self._rooms = rooms
        self._others = others
        self._joins = joins
        self._space = space
        self._usage = space.usage
        self._limit_s = limit.limit_s
        self._seats = [
            Seat(
                crew,
                crew.num_replicas,
                crew.multiple,
                space.usage.of(crew.num_replicas, crew.kind),
                space.rates.of(crew),
            )
            for crew in space.crews
        ]

    def is_sparse(self, frame: Frame) -> bool:
        """Whether only some places of a frame are of interest."""
        is_first = frame.num_before == 0  # no stage before it ends in it
        is_plain = not frame.run.blocks and len(frame.run) <= MOST_SPARSE
        return is_first and is_plain and not self._space.is_small

    def fill_sparsely(self, table: Table) -> None:
        """Finds the ways at the places of a frame that stages from its beginning reach."""
        rooms, stops = (
            self._rooms.of(table.frame),
            self._rooms.stops(table.frame),
        )
        counts = [seat.crew.num_replicas for seat in self._seats]
        table.bound(counts, stops)
        size = len(table.frame.run)
        is_reached = [True, *(False for _ in table.frame.trunk)]
        for boundary in range(size):
            if is_reached[boundary]:
                for count, stop in zip(counts, stops[boundary]):
                    if stop > boundary and count + table.behind[stop] <= rooms[boundary]:
                        is_reached[stop] = True
        for boundary in range(size - 1, -1, -1):
            if is_reached[boundary]:
                self.fill(table, boundary)

    def fill(self, table: Table, boundary: int) -> None:
        """Finds the ways at a place."""
        frame = table.frame
        room = self._rooms.of(frame)[boundary]
        if room > 0:
            self._cut(_Start(table, frame, boundary, room, table.ways[boundary]))
        table.close(boundary)

    def _cut(self, start: _Start) -> None:
        if self._space.is_small:
            for seat, last, _ in self._seated(start):
                for end in range(start.boundary, last + 1):
                    self._end_at(start, seat, end)
            return
        seated = self._seated(start)
        if start.frame.level == 0 and self._usage.has_one_kind:
            seated.sort(key=itemgetter(2))
            for seat, last, least in seated:
                if not (start.ways and _has_better(start.ways, *least)):
                    self._longest(start, seat, start.boundary, last + 1)
            return
        reached: dict[int, int] = {}  # by kind: more replicas are only worth a longer stage
        for seat, last, _ in seated:
            first = reached.get(seat.crew.kind, start.boundary)
            if first <= last:
                found = self._longest(start, seat, first, last + 1)
                reached[seat.crew.kind] = max(first, found + 1)

    def _seated(self, start: _Start) -> list[tuple[Seat, int, tuple[int, int, int]]]:
        """Devices of a first stage, where it ends at last, and what its ways have at least.

        That is, devices, need, and offset (see :class:`Way`).
        """
        table, boundary, room = start.table, start.boundary, start.room
        is_small = self._space.is_small
        found = []
        for seat, stop in zip(self._seats, self._rooms.stops(start.frame)[boundary]):
            num_replicas, multiple = seat.num_replicas, seat.multiple
            if num_replicas + table.behind[stop] > room or stop <= boundary:
                continue
            last = stop - 1
            if table.least_at[last] is NO_WAYS:
                last = self._last_open(table, boundary, stop)
                if last < boundary:
                    continue
            devices, need, offset = table.least_at[last]
            if devices + num_replicas <= room or is_small:
                units = units_in_flight(need, offset, multiple)
                least = devices + num_replicas, units + multiple, units - multiple
                found.append((seat, last, least))
        return found

    def _last_open(self, table: Table, first: int, stop: int) -> int:
        """The last point before ``stop`` where there are ways; less than ``first`` if none.

        Where no stage has been refused for its messages or for want of memory, only devices can be
        missing behind the longest stage, and a shorter one leaves even more to others.
        """
        for last in range(stop - 1, first - 1, -1):
            boundary = last + 1
            if boundary < len(table.is_filled) and not table.is_filled[boundary]:
                if last < stop - 1 and not table.has_refused:
                    return -1
                self.fill(table, boundary)
            if table.least_at[last] is not NO_WAYS:
                return last
        return -1

    def _longest(self, start: _Start, seat: Seat, first: int, stop: int) -> int:
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

    def _end_at(self, start: _Start, seat: Seat, index: int) -> int:
        """Adds the ways whose first stage ends at a point, or in a branch behind it."""
        frame = start.frame
        point = frame.trunk[index]
        intervals = frame.stage(start.boundary, index)
        outcome = self._try(start, seat, point, intervals)
        if frame.is_fork[index]:
            path, sums = self._space.path(seat.crew, frame), seat.rates.least_seconds
            left_s = sums[frame.run.bounds[start.boundary]] + self._limit_s - path[index]
            for longer, head in self._heads(point, intervals, seat, left_s):
                outcome = max(outcome, self._try(start, seat, head, longer))
        return outcome

    def _heads(
        self, point: EndPoint, intervals: tuple[Interval, ...], seat: Seat, left_s: float
    ) -> Iterator[tuple[tuple[Interval, ...], EndPoint]]:
        """Ends of a stage in the branches of the block behind a point."""
        sums = seat.rates.least_seconds
        for child in point.frame.children(point.boundary):
            start = child.run.start
            boundary = (
                bisect_right(child.run.bounds, sums[start] + left_s, key=sums.__getitem__) - 1
            )
            if boundary < len(child.run):
                next_s = sums[child.run.bounds[boundary + 1]] - sums[start]
                self._limit.too_slow(next_s - left_s + self._limit_s)
            last = 0 if self._space.is_small else max(0, boundary - 1)
            for end in range(boundary, last - 1, -1):
                head = EndPoint(child, end, (), point.crossed)
                longer = joined(intervals, (start, child.run.bounds[end])) if end else intervals
                if end:
                    yield longer, head
                if end in child.run.blocks:
                    rest_s = left_s - (sums[child.run.bounds[end]] - sums[start])
                    yield from self._heads(head, longer, seat, rest_s)

    def _try(
        self, start: _Start, seat: Seat, point: EndPoint, intervals: tuple[Interval, ...]
    ) -> int:
        """Adds the ways whose first stage is of some intervals; says what became of it."""
        space, crew, multiple = self._space, seat.crew, seat.crew.multiple
        may_grow = space.is_small and bool(point.crossed)
        most = self._limit.most_in_flight(intervals, seat.rates)
        if most < 1 and not may_grow:
            start.table.has_refused = True
            return NOT_POSSIBLE
        table = start.table.tables[point.frame.number]
        if not table.is_filled[point.boundary]:
            self.fill(table, point.boundary)
        level = 2 * (start.frame.level - len(point.crossed))
        joins: dict[int, list[Join]] = {}
        spare: int | None = None
        outcome = NOT_POSSIBLE
        usage, room, ways = self._usage, start.room, start.ways
        for way in table.ways[point.boundary]:
            need, offset, total, beside, trace = way
            total += seat.used
            if not usage.fits(total, room):
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
                start.table.has_refused = True
                continue
            outcome = ACCEPTED
            need, offset = units + multiple, units - multiple
            if not point.crossed:
                new = Way(need, offset, total, beside, Cut(intervals, crew, units, trace))
                add_way(ways, new, usage)
                continue
            if spare is None:
                spare = self._spare(start, seat, point, intervals)
            if usage.total(total) > spare:
                continue
            if units not in joins:
                joins[units] = self._joins.of(point.crossed, intervals, crew, units)
            for found in joins[units]:
                if usage.fits(total + found.used, room):
                    cut = Cut(found.intervals, crew, units, trace)
                    both = Beside(found.trace, cut)
                    new = Way(need, offset, total + found.used, beside + found.beside, both)
                    add_way(ways, new, usage)
        return outcome

    def _spare(
        self, start: _Start, seat: Seat, point: EndPoint, intervals: tuple[Interval, ...]
    ) -> int:
        """Devices that a stage with joins and what follows it may use."""
        sums = seat.rates.least_seconds
        left_s = self._limit_s - sum(sums[stop] - sums[first] for first, stop in intervals)
        beside = (
            self._others.fewest_beside(frame.others, seat.crew, left_s) for frame in point.crossed
        )
        return start.room - sum(beside)


def _has_better(ways: list[Way], devices: int, need: int, offset: int) -> bool:
    """Whether one of some ways is nowhere worse than what others have at least."""
    return any(way[0] <= need and way[1] <= offset and way[2] <= devices for way in ways)
