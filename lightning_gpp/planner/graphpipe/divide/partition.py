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
from lightning_gpp.planner.graphpipe.divide.siblings import Siblings
from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.frames import EndPoint, Frame
from lightning_gpp.planner.graphpipe.space.layout import ElementRun, Interval, joined
from lightning_gpp.planner.graphpipe.space.space import Space
from lightning_gpp.planner.graphpipe.tolerances import DEVICES

FAR = 1 << 40
"""More devices than there are."""


@dataclass(slots=True)
class Table:
    """The ways of one frame.

    Attributes:
        ways: for every boundary the ways to divide what follows.
        least: for every boundary the fewest devices of those, and of the ways in a block behind it.
        least_at: the same at every point of the frame's trunk.
    """

    ways: list[list[Way]]
    least: list[int]
    least_at: list[int]


Tables = dict[int, Table]
"""Frame -> its ways."""


class LimitedWays:
    """The ways that respect one limit.

    Attributes:
        limit: most seconds per sample of a stage.
        siblings: the ways of branches beside owners.
    """

    def __init__(self, space: Space, limit_s: float, most_tried: float = math.inf) -> None:
        self._space = space
        self._usage = space.usage
        self.limit = Limit(space, limit_s, most_tried)
        self._sides: dict[tuple[int, int, int], list[Way]] = {}
        self.siblings = Siblings(space, self.limit, self.side)
        self._joins = Joins(space, self.limit, self.siblings, self.side)

    def ways(self) -> list[Way]:
        """The ways to divide the whole model.

        Raises:
            OutOfBudgetError: more stages would have to be tried than may be.
        """
        return self._solve(self._space.root, MODEL_END)

    def side(self, run: ElementRun, behind: Way) -> list[Way]:
        """The ways to divide a branch, given what follows it.

        Their places are those of the branch of its ``Space.side_frame``.
        """
        key = run.kind, behind.need, behind.offset
        found = self._sides.get(key)
        if found is None:
            frame = self._space.side_frame(run)
            found = self._sides[key] = self._solve(frame, behind)
        return found

    def _solve(self, frame: Frame, end: Way) -> list[Way]:
        tables: Tables = {}
        self._fill(frame, [end], tables)
        return tables[frame.number].ways[0]

    def _fill(self, frame: Frame, end: list[Way], tables: Tables) -> None:
        """Finds the ways of a frame from its last boundary to its first."""
        size, trunk = len(frame.run), frame.trunk
        behind = [tables[point.frame.number].least[point.boundary] for point in trunk[size:]]
        table = Table([*([] for _ in range(size)), end], [FAR] * (size + 1), [FAR] * size + behind)
        tables[frame.number] = table
        self._close(frame, table, size, tables)
        for boundary in range(size - 1, -1, -1):
            room = self._room(frame, boundary)
            if room > 0:
                if boundary in frame.run.blocks:
                    self._fill_block(frame, boundary, room, tables)
                self._cut(frame, boundary, room, tables)
            self._close(frame, table, boundary, tables)

    def _close(self, frame: Frame, table: Table, boundary: int, tables: Tables) -> None:
        """All ways at a boundary are found."""
        least = [self._usage.total(way.used) for way in table.ways[boundary]]
        for child in frame.children(boundary):
            least += tables[child.number].least if child.number in tables else []
        table.least[boundary] = min(least, default=FAR)
        if boundary:
            table.least_at[boundary - 1] = table.least[boundary]

    def _room(self, frame: Frame, boundary: int) -> int:
        """Devices that what follows a boundary may use, so that the work before it finds enough."""
        work = self._space.work_before(frame, boundary)
        count = math.ceil(work / self.limit.limit_s - DEVICES)
        if count > 1:
            self.limit.too_slow(work / (count - 1))
        return self._usage.num_devices - max(0, count)

    def _fill_block(self, frame: Frame, boundary: int, room: int, tables: Tables) -> None:
        """Adds the ways in which a stage begins with a block, and fills the frames in it."""
        table = tables[frame.number]
        ways, behind = table.ways[boundary], table.ways[boundary + 1]
        for child in frame.children(boundary):
            self._fill(child, [*self._at_join(child, behind)], tables)
            for way in tables[child.number].ways[0]:
                self._add(ways, _forked(way), room)
        for way in behind:  # no stage holds both a part of the block and something around it
            for side in self._beside(way, frame.run.blocks[boundary]):
                used, trace = way.used + side.used, Beside(side.trace, way.trace)
                self._add(ways, Way(side.need, side.offset, used, way.beside, trace), room)

    def _at_join(self, child: Frame, behind: list[Way]) -> list[Way]:
        """The ways at the end of an owner where a stage begins at the join."""
        ways: list[Way] = []
        room = self._room(child, len(child.run))
        for way in behind:
            for side in self._beside(way, child.others):
                used, trace = way.used + side.used, Beside(side.trace, way.trace)
                beside = (*way.beside, side.need, side.offset)
                self._add(ways, Way(way.need, way.offset, used, beside, trace), room)
        return ways

    def _beside(self, behind: Way, runs: tuple[ElementRun, ...]) -> list[Way]:
        """The ways of branches before others; none before the end, as a branch's end is last."""
        if behind is MODEL_END:
            return []
        return self.siblings.ways(runs, behind.need, behind.offset)

    def _add(self, ways: list[Way], new: Way, room: int) -> bool:
        """Adds a way if there are devices for it; says whether."""
        if not self._usage.fits(new.used, room):
            return False
        add_way(ways, new, self._usage)
        return True

    def _cut(self, frame: Frame, boundary: int, room: int, tables: Tables) -> None:
        """Adds the ways by their first stage: on which devices it is, and where it ends.

        Stages are as long as the limit and memory let them be, in small models of any length. More
        replicas are only worth a longer stage.
        """
        reached: dict[int, int] = {}
        least_at = tables[frame.number].least_at
        for crew in self._space.crews:
            first, spare = reached.get(crew.kind, boundary), room - crew.num_replicas
            for end in range(self._longest(frame, boundary, crew), first - 1, -1):
                if least_at[end] > spare:
                    if least_at[end] < FAR and not self._space.is_small:
                        break  # shorter stages leave even more to others
                    continue
                is_found = self._end_at(frame, boundary, end, crew, room, tables)
                if is_found and not self._space.is_small:
                    reached[crew.kind] = end + 1
                    break

    def _longest(self, frame: Frame, boundary: int, crew: Crew) -> int:
        """The last point of a frame's trunk at which a stage may end, if only compute counts."""
        path = self._space.path(crew, frame)
        begin_s = path[boundary]
        stop = bisect_right(path, begin_s + self.limit.limit_s, boundary + 1)
        if stop < len(path):
            self.limit.too_slow(path[stop] - begin_s)
        return stop - 2

    def _end_at(
        self, frame: Frame, boundary: int, index: int, crew: Crew, room: int, tables: Tables
    ) -> bool:
        """Adds the ways whose first stage ends at a point, or in a branch behind it."""
        point, intervals = frame.trunk[index], frame.stage(boundary, index)
        is_found = self._try(frame, boundary, point, intervals, crew, room, tables)
        for longer, head in self._heads(point, intervals, crew):
            is_found |= self._try(frame, boundary, head, longer, crew, room, tables)
        return is_found

    def _heads(
        self, point: EndPoint, intervals: tuple[Interval, ...], crew: Crew
    ) -> Iterator[tuple[tuple[Interval, ...], EndPoint]]:
        """Ends of a stage in the branches of a block behind a point."""
        for child in point.frame.children(point.boundary):
            start, bounds = child.run.start, child.run.bounds
            for end in range(len(child.run) + 1):
                longer = joined(intervals, (start, bounds[end])) if end else intervals
                seconds = self._space.seconds(longer, crew)
                if seconds > self.limit.limit_s:
                    self.limit.too_slow(seconds)
                    break
                head = EndPoint(child, end, (), point.crossed)
                if end:
                    yield longer, head
                yield from self._heads(head, longer, crew)

    def _try(
        self,
        frame: Frame,
        boundary: int,
        point: EndPoint,
        intervals: tuple[Interval, ...],
        crew: Crew,
        room: int,
        tables: Tables,
    ) -> bool:
        """Adds the ways whose first stage is of some intervals; says whether there are any."""
        space, multiple = self._space, crew.multiple
        own = space.usage.of(crew.num_replicas, crew.kind)
        table = tables.get(point.frame.number)
        found = table.ways[point.boundary] if table else ()
        behind = [way for way in found if self._usage.fits(way.used + own, room)]
        if not behind:
            return False
        most = self.limit.most_in_flight(intervals, space.rates.of(crew))
        # With whole branches in it a stage with a join may have fewer messages, and fit.
        may_grow = bool(point.crossed)
        if most < 1 and not may_grow:
            return False
        ways = tables[frame.number].ways[boundary]
        level = 2 * (frame.level - len(point.crossed))
        joins: dict[int, list[Join]] = {}
        is_found = False
        for way in behind:
            need, offset, used, beside, trace = way
            if len(beside) > level:
                need = max(need, *beside[level::2])
                offset = max(offset, *beside[level + 1 :: 2])
                beside = beside[:level]
            units = units_in_flight(need, offset, multiple)
            if way is MODEL_END and crew.num_replicas > 1:
                units = 2 * multiple  # the loss of replicas is computed in a stage of its own
            if units not in joins:
                if point.crossed:
                    joins[units] = self._joins.of(point.crossed, intervals, crew, units)
                else:
                    fits = space.in_flight(units, crew) <= most
                    joins[units] = [Join(intervals, (), 0, None)] if fits else []
            for join in joins[units]:
                cut = Cut(join.intervals, crew, units, trace)
                new = Way(
                    units + multiple,
                    units - multiple,
                    used + own + join.used,
                    beside + join.beside,
                    Beside(join.trace, cut) if join.trace else cut,
                )
                is_found |= self._add(ways, new, room)
        return is_found


def _forked(way: Way) -> Way:
    """A way at the beginning of an owner as one at the fork."""
    *beside, need, offset = way.beside
    return Way(max(way.need, need), max(way.offset, offset), way.used, tuple(beside), way.trace)
