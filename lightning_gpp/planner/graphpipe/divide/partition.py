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

from lightning_gpp.planner.graphpipe.divide.first_stages import FirstStages
from lightning_gpp.planner.graphpipe.divide.frontier import MODEL_END, Beside, Way, add_way
from lightning_gpp.planner.graphpipe.divide.joins import Joins
from lightning_gpp.planner.graphpipe.divide.limit import Limit
from lightning_gpp.planner.graphpipe.divide.others import Others
from lightning_gpp.planner.graphpipe.divide.rooms import Rooms
from lightning_gpp.planner.graphpipe.divide.siblings import Siblings
from lightning_gpp.planner.graphpipe.divide.tables import Table, Tables
from lightning_gpp.planner.graphpipe.space.frames import Frame
from lightning_gpp.planner.graphpipe.space.layout import ElementRun
from lightning_gpp.planner.graphpipe.space.space import Space


class LimitedWays:
    """The ways that respect one limit.

    Attributes:
        limit: most seconds per sample of a stage.
        rooms: the devices that are left for what follows a boundary.
        others: the fewest devices of branches beside owners.
        siblings: the ways of branches beside owners.
        joins: the stages with joins.
    """

    def __init__(self, space: Space, limit_s: float) -> None:
        self._space = space
        self._usage = space.usage
        self.limit = Limit(space, limit_s)
        self._sides: dict[tuple[int, int, int], list[Way]] = {}
        self.rooms = Rooms(space, self.limit.limit_s)
        self.others = Others(space, self.limit.limit_s, self.rooms)
        self.siblings = Siblings(space, self.limit, self.side)
        self.joins = Joins(space, self.limit, self.siblings)
        self._first_stages = FirstStages(space, self.limit, self.rooms, self.others, self.joins)

    def ways(self) -> list[Way]:
        """The ways to divide the whole model."""
        root, rooms = self._space.root, self.rooms
        if rooms.of(root)[-1] < 0:
            self.limit.too_slow(min(rooms.next_limit_s, rooms.next_work_s))
            return []
        found = self._solve(root, MODEL_END)
        self.limit.too_slow(
            min(rooms.next_limit_s, rooms.next_work_s if self._space.is_small else math.inf)
        )
        return found

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
        table = tables[frame.number] = Table(frame, end, tables, self._usage)
        if self._first_stages.is_sparse(frame):
            self._first_stages.fill_sparsely(table)
            return
        for boundary in range(len(frame.run) - 1, -1, -1):
            if boundary in frame.run.blocks:
                self._fill_block(table, boundary, self.rooms.of(frame)[boundary])
            self._first_stages.fill(table, boundary)

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
        spare = room - self.others.fewest_apart(table.frame.run.blocks[boundary])
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
        room = self.rooms.of(child)[-1]
        spare = room - self.others.fewest_apart(child.others)
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


def _forked(way: Way) -> Way:
    """A way at the beginning of an owner as one at the fork."""
    *beside, need, offset = way.beside
    return Way(max(way.need, need), max(way.offset, offset), way.used, tuple(beside), way.trace)
