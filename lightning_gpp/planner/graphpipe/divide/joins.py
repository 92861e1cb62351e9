"""Stages that hold joins: as they are, or with branches, or the ends of branches, taken in.

Seven branches of four layers fill eight devices only if the stage with the join takes the last
layer of four of them: then each of the other seven stages has three or four layers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from lightning_gpp.planner.graphpipe.divide.frontier import Beside, Trace, Way
from lightning_gpp.planner.graphpipe.divide.limit import Limit
from lightning_gpp.planner.graphpipe.divide.siblings import (
    FEW_BRANCHES,
    Group,
    Siblings,
    places_of,
)
from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.frames import Frame
from lightning_gpp.planner.graphpipe.space.layout import ElementRun, Interval, joined
from lightning_gpp.planner.graphpipe.space.space import Space

Places = tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """A stage that holds joins, with the branches before them.

    Attributes:
        intervals: places of the stage, those that it took in included.
        beside: need and offset beside the owner of each join, outermost first.
        used: devices of the branches, the stage itself not counted.
        trace: stages of the branches.
    """

    intervals: Places
    beside: tuple[int, ...]
    used: int
    trace: Trace | None


class Joins:
    """Finds, for one limit, the stages with joins.

    Args:
        space: what may be chosen.
        limit: most seconds per sample of a stage.
        siblings: the ways of branches beside owners.
        side: the ways to divide one branch, given what follows it.
    """

    def __init__(
        self,
        space: Space,
        limit: Limit,
        siblings: Siblings,
        side: Callable[[ElementRun, Way], list[Way]],
    ) -> None:
        self._space = space
        self._limit = limit
        self._siblings = siblings
        self._side = side
        self._sparing: dict[tuple[int, int, int], int | None] = {}

    def of(self, crossed: Sequence[Frame], stage: Places, crew: Crew, units: int) -> list[Join]:
        """A stage with joins as it is, and with branches taken in.

        Args:
            crossed: the frames of the owners, innermost first.
            stage: its places.
            crew: its devices.
            units: its smallest micro-batches in flight.
        """
        need, offset = units + crew.multiple, units - crew.multiple
        joins = [Join(stage, (), 0, None)]
        for frame in reversed(crossed):
            joins = [
                Join(
                    longer,
                    (*join.beside, sides.need, sides.offset),
                    join.used + sides.used,
                    Beside(sides.trace, join.trace),
                )
                for join in joins
                for longer, left in self._longer(join.intervals, frame.others, crew, units)
                for sides in self._siblings.ways(left, need, offset)
            ]
        return [j for j in joins if self._limit.fits(j.intervals, crew, units)]

    def _longer(
        self, stage: Places, others: Group, crew: Crew, units: int
    ) -> Iterator[tuple[Places, Group]]:
        """A stage with branches, or ends of them, in it, and what is left of the branches."""
        if self._space.is_small and len(others) <= FEW_BRANCHES:
            for size in range(len(others) + 1):
                for runs in combinations(others, size):
                    left = tuple(run for run in others if run not in runs)
                    yield joined(stage, *places_of(runs)), left
            return
        whole = {run: run.interval for run in others}
        longer, taken = self._filled(stage, whole, crew, units, heavy_first=True)
        yield stage, others
        yield from self._with_ends(stage, others, crew, units)
        if taken:
            left = tuple(run for run in others if run not in taken)
            yield longer, left
            yield from self._with_ends(longer, left, crew, units)

    def _with_ends(
        self, stage: Places, runs: Group, crew: Crew, units: int
    ) -> Iterator[tuple[Places, Group]]:
        """A stage with the ends of branches that spare the rest of them a device, if there are."""
        ends, beginnings = {}, {}
        for run in runs:
            last = run.bounds[-2], run.bounds[-1]
            if self._space.seconds((*stage, last), crew) > self._limit.limit_s:
                self._limit.too_slow(self._space.seconds((*stage, last), crew))
                continue
            size = self._sparing_size(run, units + crew.multiple, units - crew.multiple)
            if size is not None:
                ends[run] = run.bounds[size], run.bounds[-1]
                beginnings[run] = self._space.frames.beginning(run, size)
        longer, taken = self._filled(stage, ends, crew, units, heavy_first=False)
        if taken:
            yield longer, tuple(beginnings[run] if run in taken else run for run in runs)

    def _filled(
        self,
        stage: Places,
        pieces: dict[ElementRun, Interval],
        crew: Crew,
        units: int,
        *,
        heavy_first: bool,
    ) -> tuple[Places, set[ElementRun]]:
        """A stage with pieces of branches, as far as its time and memory allow, in their order."""
        each_s = {run: self._space.seconds((places,), crew) for run, places in pieces.items()}
        order = sorted(pieces, key=lambda run: -each_s[run] if heavy_first else each_s[run])
        at_s, taken = self._space.seconds(stage, crew), set()
        for run in order:
            longer = joined(stage, pieces[run])
            if at_s + each_s[run] > self._limit.limit_s:
                self._limit.too_slow(at_s + each_s[run])
            elif self._limit.fits(longer, crew, units):
                stage = longer
                at_s += each_s[run]
                taken.add(run)
        return stage, taken

    def _sparing_size(self, run: ElementRun, need: int, offset: int) -> int | None:
        """Most elements of a branch that need fewer devices than all of them; None if none do."""
        key = run.kind, need, offset
        if key not in self._sparing:
            behind = Way(need, offset, 0, (), None)
            whole = self._fewest(run, behind)
            sizes = range(1, len(run))

            def spares_none(size: int) -> bool:
                return self._fewest(self._space.frames.beginning(run, size), behind) >= whole

            size = bisect_left(sizes, True, key=spares_none)  # more elements, no fewer devices
            found = size if whole < math.inf and size else None
            self._sparing[key] = found
        return self._sparing[key]

    def _fewest(self, run: ElementRun, behind: Way) -> float:
        ways = self._side(run, behind)
        return min((self._space.usage.total(way.used) for way in ways), default=math.inf)
