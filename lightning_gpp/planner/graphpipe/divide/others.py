"""The fewest devices of branches beside the owner of a block.

On their own, or beside a stage that takes in some of them. Like those before a boundary (see
:mod:`lightning_gpp.planner.graphpipe.divide.rooms`) they only count what branches compute, so that
what finds no room by them need not be looked at any closer.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from itertools import accumulate
from operator import mul

from lightning_gpp.planner.graphpipe.divide.rooms import Rooms
from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.layout import ElementRun
from lightning_gpp.planner.graphpipe.space.space import Space
from lightning_gpp.planner.graphpipe.tolerances import DEVICES, LEAST

Kinds = tuple[tuple[ElementRun, int], ...]
"""Branches, one of each kind, and how many there are like it."""


class Others:
    """The fewest devices of branches for one limit.

    Args:
        space: what is divided.
        limit_s: most seconds per sample of a stage.
        rooms: the devices of what precedes boundaries.
    """

    def __init__(self, space: Space, limit_s: float, rooms: Rooms) -> None:
        self._space = space
        self._limit_s = limit_s * (1 + LEAST)
        self._rooms = rooms
        self._apart: dict[tuple[ElementRun, ...], int] = {}
        self._found_kinds: dict[tuple[ElementRun, ...], Kinds] = {}
        self._found_shares: dict[Kinds, list[float]] = {}

    def fewest_apart(self, runs: tuple[ElementRun, ...]) -> int:
        """Fewest devices of branches that no other stage takes anything from."""
        if self._space.is_small or not runs:
            return 0
        found = self._apart.get(runs)
        if found is None:
            kinds = self._kinds(runs)
            alone = [self._fewest_alone(run)[-1] for run, _ in kinds]
            found = self._apart[runs] = self._together(kinds, alone, 0.0)
        return found

    def fewest_beside(self, runs: tuple[ElementRun, ...], crew: Crew, left_s: float) -> int:
        """Fewest devices of branches beside a stage that has some time left for pieces of them.

        Args:
            runs: the branches.
            crew: the devices of the stage.
            left_s: seconds per sample that it may take in.
        """
        if self._space.is_small or not runs:
            return 0
        sums = self._space.rates.least_seconds(crew)
        alone, kinds = [], self._kinds(runs)
        for run, _ in kinds:
            end_s = sums[run.bounds[-1]] - left_s - self._limit_s * LEAST
            size = bisect_left(run.bounds, end_s, key=sums.__getitem__)
            if size:
                self._rooms.note(end_s - sums[run.bounds[size - 1]] + self._limit_s)
            alone.append(self._fewest_alone(run)[size])
        return self._together(kinds, alone, crew.num_replicas * left_s)

    def _kinds(self, runs: tuple[ElementRun, ...]) -> Kinds:
        """Branches that differ, and how many there are of each."""
        found = self._found_kinds.get(runs)
        if found is None:
            counts = Counter(run.kind for run in runs)
            one_of = {run.kind: run for run in runs}
            found = tuple((one_of[kind], count) for kind, count in counts.items())
            self._found_kinds[runs] = found
        return found

    def _fewest_alone(self, run: ElementRun) -> list[int]:
        return self._rooms.fewest_before(self._space.side_frame(run))

    def _together(self, kinds: Kinds, alone: list[int], done: float) -> int:
        """Fewest devices of branches.

        Args:
            kinds: the branches.
            alone: devices of one of each kind on its own at least.
            done: device-seconds of work per sample that another stage does for them.
        """
        if len(kinds) == 1 and kinds[0][1] == 1:
            return alone[0]
        sums = self._space.work
        each = zip(kinds, alone, self._shares(kinds))
        least = max(*alone, math.ceil(sum(n * min(own, s) for (_, n), own, s in each) - DEVICES))
        work = sum(count * (sums[run.bounds[-1]] - sums[run.start]) for run, count in kinds)
        return max(least, self._rooms.devices(work - done, least))

    def _shares(self, kinds: Kinds) -> list[float]:
        """Devices for one branch of each kind at least where it is in one stage with others."""
        found = self._found_shares.get(kinds)
        if found is None:
            found = [math.inf] * len(kinds)
            counts = [count for _, count in kinds]
            for crew in self._space.crews:
                sums = self._space.rates.least_seconds(crew)
                each = [sums[run.bounds[-1]] - sums[run.start] for run, _ in kinds]
                in_order = sorted(s for s, count in zip(each, counts) for _ in range(count))
                together = [*accumulate(in_order)]
                most = bisect_right(together, self._limit_s)
                if most < len(together):
                    self._rooms.note(together[most])
                if most > 1:
                    by_time = [crew.num_replicas * s / self._limit_s for s in each]
                    by_count = [crew.num_replicas / most] * len(each)
                    is_more = sum(map(mul, counts, by_time)) > sum(map(mul, counts, by_count))
                    found = [*map(min, found, by_time if is_more else by_count)]
            self._found_shares[kinds] = found
        return found
