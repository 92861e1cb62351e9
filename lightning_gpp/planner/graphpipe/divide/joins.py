"""Stages that hold joins: as they are, or with branches, or the ends of branches, taken in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from lightning_gpp.planner.graphpipe.divide.frontier import Beside, Trace, units_in_flight
from lightning_gpp.planner.graphpipe.divide.limit import Limit
from lightning_gpp.planner.graphpipe.divide.siblings import FEW_BRANCHES, Siblings
from lightning_gpp.planner.graphpipe.space.branches import Group
from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.frames import Frame
from lightning_gpp.planner.graphpipe.space.layout import ElementRun, Interval, joined
from lightning_gpp.planner.graphpipe.space.space import Space
from lightning_gpp.planner.graphpipe.space.tails import end_of, fewest_devices, sparing_size

Places = tuple[Interval, ...]

Piece = tuple[float, ElementRun, Interval]
"""Seconds per sample, a branch, and the places of it that a stage may take in."""


@dataclass(frozen=True, slots=True)
class Join:
    """A stage that holds joins, with the branches before them.

    Attributes:
        intervals: places of the stage, whole branches that it took in included.
        beside: need and offset beside the owner of each join, outermost first.
        used: devices of the branches, the stage itself not counted.
        trace: stages of the branches.
    """

    intervals: Places
    beside: tuple[int, ...]
    used: int
    trace: Trace | None


class Joins:
    """Finds, for one limit, the stages with joins."""

    def __init__(self, space: Space, limit: Limit, siblings: Siblings) -> None:
        self._limit = limit
        self._space = space
        self._siblings = siblings
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
        if self._space.is_small:
            return [j for j in joins if self._limit.fits(j.intervals, crew, units)]
        return joins

    def _longer(
        self, stage: Places, others: Group, crew: Crew, units: int
    ) -> Iterator[tuple[Places, Group]]:
        """A stage with branches, or ends of them, in it, and what is left of the branches."""
        if self._space.is_small and len(others) <= FEW_BRANCHES:
            yield from _with_any(stage, others)
            return
        by_weight = self._space.branches.by_weight(others)
        pieces = [
            (load.seconds, run, run.interval)
            for load in self._space.branches.loads(others)[self._space.crews.index(crew)]
            for run in by_weight[load.weight]
        ]
        stages = [(stage, others)]
        longer, taken = self._filled(stage, pieces, crew, units)
        if taken:
            stages.append((longer, tuple(run for run in others if run not in taken)))
        for whole, left in stages:
            yield whole, left
            if not self._space.is_small:
                yield from self._with_ends(whole, left, crew, units)

    def _with_ends(
        self, stage: Places, runs: Group, crew: Crew, units: int
    ) -> Iterator[tuple[Places, Group]]:
        """A stage with the ends of branches that spare the rest of them a device, if there are."""
        pieces: list[Piece] = []
        sizes = {}
        room_s = self._limit.limit_s - self._seconds(stage, crew)
        for alike in self._space.branches.by_weight(runs).values():
            last_s = self._seconds((end_of(alike[0], len(alike[0]) - 1),), crew)
            if last_s > room_s:
                self._limit.too_slow(self._limit.limit_s + (last_s - room_s))
                continue
            size = self._sparing_size(alike[0], units + crew.multiple, units - crew.multiple)
            if size is not None:
                end_s = self._seconds((end_of(alike[0], size),), crew)
                pieces += [(end_s, run, end_of(run, size)) for run in alike]
                sizes.update(dict.fromkeys(alike, size))
        pieces.sort(key=lambda piece: piece[0])
        longer, taken = self._filled(stage, pieces, crew, units)
        if taken:
            beginning = self._space.beginnings.beginning
            yield longer, tuple(beginning(r, sizes[r]) if r in taken else r for r in runs)

    def _filled(
        self, stage: Places, pieces: Sequence[Piece], crew: Crew, units: int
    ) -> tuple[Places, set[ElementRun]]:
        """A stage with pieces of branches, as far as its time and memory allow, in their order."""
        limit_s = self._limit.limit_s
        room_s = limit_s - self._seconds(stage, crew)
        taken: list[Piece] = []
        for piece in pieces:
            if piece[0] > room_s:
                self._limit.too_slow(limit_s + (piece[0] - room_s))
            else:
                room_s -= piece[0]
                taken.append(piece)
        longer = joined(stage, *(interval for _, _, interval in taken))
        if taken and not self._limit.fits(longer, crew, units):
            return self._with_memory(stage, pieces, crew, units)
        return longer, {run for _, run, _ in taken}

    def _with_memory(
        self, stage: Places, pieces: Sequence[Piece], crew: Crew, units: int
    ) -> tuple[Places, set[ElementRun]]:
        """The same piece by piece, where they do not all find memory together."""
        room_s = self._limit.limit_s - self._seconds(stage, crew)
        taken = set()
        for piece_s, run, interval in pieces:
            longer = joined(stage, interval)
            if piece_s <= room_s and self._limit.fits(longer, crew, units):
                stage = longer
                room_s -= piece_s
                taken.add(run)
        return stage, taken

    def _seconds(self, stage: Places, crew: Crew) -> float:
        """Seconds per sample that a stage takes at least."""
        sums = self._space.rates.least_seconds(crew)
        return sum(sums[stop] - sums[start] for start, stop in stage)

    def _sparing_size(self, run: ElementRun, need: int, offset: int) -> int | None:
        key = run.kind, need, offset
        if key not in self._sparing:
            sums = {crew: self._space.rates.least_seconds(crew) for crew in self._space.crews}
            units = {crew: units_in_flight(need, offset, crew.multiple) for crew in sums}

            def fits(interval: Interval, crew: Crew) -> bool:
                return self._limit.fits((interval,), crew, units[crew])

            num_devices = fewest_devices(run, self._limit.limit_s, sums, fits)
            self._sparing[key] = sparing_size(num_devices)
        return self._sparing[key]


def _with_any(stage: Places, others: Group) -> Iterator[tuple[Places, Group]]:
    """A stage with any of the branches in it, and the branches that are left."""
    for size in range(len(others) + 1):
        for runs in combinations(others, size):
            longer = joined(stage, *(run.interval for run in runs))
            yield longer, tuple(run for run in others if run not in runs)
