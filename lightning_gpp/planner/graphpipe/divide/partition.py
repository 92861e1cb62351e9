"""All divisions into stages that are fast enough: the dynamic program of GraphPipe, in a line.

For a limit on every stage's seconds per sample and a micro-batch size, the fewest devices for each
number of micro-batches in flight at the first stage. It is the dual of ``DP`` in algorithm 1 of
GraphPipe (arXiv 2406.17145, section 5.2), which is given the devices and seeks the fewest
micro-batches in flight; like it, it goes from the end of the model to its beginning, as the number
in flight of a stage depends on the stages behind it.

The units stand in the depth-first order, in which branches stay together: the series decomposition
of the paper. Its parallel decomposition, of branches into stages beside each other, is left to the
climb that follows, which starts from whole branches, too.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from operator import neg

from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.planner.graphpipe.divide.frontier import (
    MODEL_END,
    Cut,
    Way,
    add_way,
    units_in_flight,
)
from lightning_gpp.planner.graphpipe.divide.limit import Limit
from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.space import Space


class LimitedWays:
    """The ways that respect one limit.

    Attributes:
        limit: most seconds per sample of a stage.
    """

    def __init__(self, space: Space, limit_s: float) -> None:
        self._space = space
        self.limit = Limit(limit_s)
        self._ways: list[list[Way]] = [[] for _ in range(space.num_places)] + [[MODEL_END]]
        self._least = [math.inf] * space.num_places + [0]  # devices behind every place
        # Places from which the end is reached, the last one first and negative: few among many.
        self._ends = [-space.num_places]

    def ways(self) -> list[Way]:
        """The ways to divide the whole model."""
        total = self._space.usage.total
        for start in range(self._space.num_places - 1, -1, -1):
            room = self._room(start)
            if room > 0:
                self._cut(start, room)
            used = (total(way.used) for way in self._ways[start])
            self._least[start] = min(used, default=math.inf)
            if self._ways[start]:
                self._ends.append(-start)
        return self._ways[0]

    def _room(self, start: int) -> int:
        """Devices that what follows a place may use, so that the work before it finds enough."""
        work = self._space.load.work[start]
        count = math.ceil(work / self.limit.limit_s * (1 - ROUNDING))
        if count > 1:
            self.limit.too_slow(work / (count - 1))
        return self._space.usage.num_devices - max(0, count)

    def _cut(self, start: int, room: int) -> None:
        """Adds the ways by their first stage: on which devices it is, and where it ends.

        Stages are as long as the limit and memory let them be, or of any length. More replicas are
        only worth a longer stage.
        """
        reached: dict[int, int] = {}
        for crew in self._space.crews:
            first, spare = reached.get(crew.kind, start + 1), room - crew.num_replicas
            longest = self._longest(start, crew)
            for stop in map(neg, self._ends[bisect_left(self._ends, -longest) :]):
                if stop < first:
                    break
                if self._least[stop] > spare:
                    if not self._space.tries_all:
                        break  # shorter stages leave even more to others
                    continue
                is_found = self._try(start, stop, crew, room)
                if is_found and not self._space.tries_all:
                    reached[crew.kind] = stop + 1
                    break

    def _longest(self, start: int, crew: Crew) -> int:
        """The last place before which a stage may end, if only compute counts."""
        sums = self._space.rates.of(crew).least_seconds
        stop = bisect_right(sums, sums[start] + self.limit.limit_s, start + 1)
        if stop < len(sums):
            self.limit.too_slow(sums[stop] - sums[start])
        return stop - 1

    def _try(self, start: int, stop: int, crew: Crew, room: int) -> bool:
        """Adds the ways whose first stage is between two places; says whether there are any."""
        space, multiple = self._space, crew.multiple
        own = space.usage.of(crew.num_replicas, crew.kind)
        behind = [way for way in self._ways[stop] if space.usage.fits(way.used + own, room)]
        if not behind:
            return False
        most = self.limit.most_in_flight((start, stop), space.rates.of(crew))
        is_found = False
        for way in behind:
            units = units_in_flight(way, multiple)
            if way is MODEL_END and crew.num_replicas > 1:
                units = 2 * multiple  # the loss of replicas is computed in a stage of its own
            if most >= 1 and space.in_flight(units, crew) <= most:
                cut = Cut((start, stop), crew, units, way.first)
                new = Way(units + multiple, units - multiple, way.used + own, cut)
                add_way(self._ways[start], new, space.usage)
                is_found = True
        return is_found
