"""All divisions into stages that are fast enough: the dynamic program of GraphPipe, in a line.

For a limit on every stage's seconds per sample and a micro-batch size, the fewest devices for each
number of micro-batches in flight at the first stage. It is the dual of ``DP`` in algorithm 1 of
GraphPipe (arXiv 2406.17145, section 5.2), which is given the devices and seeks the fewest
micro-batches in flight; like it, it goes from the end of the model to its beginning, as the number
in flight of a stage depends on the stages behind it.

The units stand in the depth-first order, in which branches stay together: the series decomposition
of the paper. Its parallel decomposition, of branches into stages beside each other, is left to the
climb that follows, which starts from whole branches, too.

Of the ways to divide the end of a model only the best are kept: a way is better with fewer devices
and with less in flight at its beginning. What a stage holds in flight depends on the stages behind
it by the rule of :mod:`lightning_gpp.schedule.schedules`: with micro-batches of ``k`` units before
a stage of ``k_j`` units and ``i_j`` units in flight, ``i_j + k_j`` where ``k <= k_j`` and else
``i_j - k_j + 2 k``. That is ``max(need, offset + 2 k)`` with ``need = i_j + k_j`` and
``offset = i_j - k_j``, so two numbers say all about what follows.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import neg
from typing import NamedTuple

from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.planner.graphpipe.rates import Crew, Interval, Rate
from lightning_gpp.planner.graphpipe.space import DeviceCounts, Space


class Cut(NamedTuple):
    """A stage of a way.

    Attributes:
        interval: places of its units.
        crew: its devices.
        recompute: whether it runs its forward twice: it is too slow or does not fit otherwise.
        seconds_per_sample: what it takes.
        rest: the stages behind it.
    """

    interval: Interval
    crew: Crew
    recompute: bool
    seconds_per_sample: float
    rest: Cut | None


class Way(NamedTuple):
    """One way to divide what follows some place.

    Attributes:
        need: units in flight that a stage before it needs at least.
        offset: units in flight of a stage before it, less twice its own micro-batch.
        used: devices (see :class:`~lightning_gpp.planner.graphpipe.space.DeviceCounts`).
        first: its first stage.
    """

    need: int
    offset: int
    used: int
    first: Cut | None

    def cuts(self) -> Iterator[Cut]:
        """Its stages in the order of their places."""
        cut = self.first
        while cut is not None:
            yield cut
            cut = cut.rest

    def units_before(self, multiple: int) -> int:
        """Units in flight of a stage before it: a whole number of its micro-batches.

        >>> MODEL_END.units_before(multiple=4)
        4
        """
        return -(-max(self.need, self.offset + 2 * multiple, multiple) // multiple) * multiple


MODEL_END = Way(0, -(1 << 40), 0, None)
"""Nothing follows."""


class LimitedWays:
    """The ways that respect one limit.

    Attributes:
        limit_s: most seconds per sample of a stage.
        next_limit_s: the least limit seen so far at which a stage would be possible that this one
            forbids; no limit in between has other ways.
        num_tried: stages that were looked at.
    """

    def __init__(self, space: Space, limit_s: float) -> None:
        self._space = space
        self.limit_s = limit_s * (1 + ROUNDING)
        self.next_limit_s = math.inf
        self.num_tried = 0
        self._ways: list[list[Way]] = [[] for _ in range(space.num_places)] + [[MODEL_END]]
        self._least = [math.inf] * space.num_places + [0]  # devices behind every place
        # Places from which the end is reached, the last one first and negative: few among many.
        self._ends = [-space.num_places]

    def ways(self) -> list[Way]:
        """The ways to divide the whole model; none where all trials are spent."""
        total, trials = self._space.usage.total, self._space.trials
        for start in range(self._space.num_places - 1, -1, -1):
            if trials is not None and not trials.left:
                return []
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
        work = self._space.work[start]
        count = math.ceil(work / self.limit_s * (1 - ROUNDING))
        if count > 1:
            self._too_slow(work / (count - 1))
        return self._space.usage.num_devices - max(0, count)

    def _cut(self, start: int, room: int) -> None:
        """Adds the ways by their first stage: on which devices it is, and where it ends.

        Stages are as long as the limit and memory let them be, or of any length. More replicas are
        only worth a longer stage.
        """
        reached: dict[int, int] = {}
        for crew in self._space.rates:
            first, spare = reached.get(crew.kind, start + 1), room - crew.num_replicas
            longest = self._longest(start, crew)
            for stop in map(neg, self._ends[bisect_left(self._ends, -longest) :]):
                if stop < first:
                    break
                if self._least[stop] > spare:
                    if self._space.trials is None:
                        break  # shorter stages leave even more to others
                    continue
                is_found = self._try(start, stop, crew, room)
                if is_found and self._space.trials is None:
                    reached[crew.kind] = stop + 1
                    break

    def _longest(self, start: int, crew: Crew) -> int:
        """The last place before which a stage may end, if only compute counts."""
        sums = self._space.rates[crew].least_seconds
        stop = bisect_right(sums, sums[start] + self.limit_s, start + 1)
        if stop < len(sums):
            self._too_slow(sums[stop] - sums[start])
        return stop - 1

    def _try(self, start: int, stop: int, crew: Crew, room: int) -> bool:
        """Adds the ways whose first stage is between two places; says whether there are any."""
        space, multiple = self._space, crew.multiple
        own = space.usage.of(crew.num_replicas, crew.kind)
        behind = [way for way in self._ways[stop] if space.usage.fits(way.used + own, room)]
        if not behind:
            return False
        rate = self._rate((start, stop), crew)
        is_found = False
        for way in behind:
            units = way.units_before(multiple)
            if way is MODEL_END and crew.num_replicas > 1:
                units = 2 * multiple  # the loss of replicas is computed in a stage of its own
            in_flight = space.in_flight(units, crew)
            recompute = in_flight > rate.most_in_flight or rate.seconds_per_sample > self.limit_s
            most, taken_s = rate.most_in_flight, rate.seconds_per_sample
            if recompute:
                most, taken_s = rate.recomputed_most_in_flight, rate.recomputed_seconds_per_sample
            if taken_s <= self.limit_s and most >= 1 and in_flight <= most:
                cut = Cut((start, stop), crew, recompute, taken_s, way.first)
                new = Way(units + multiple, units - multiple, way.used + own, cut)
                _add(self._ways[start], new, space.usage)
                is_found = True
        return is_found

    def _rate(self, interval: Interval, crew: Crew) -> Rate:
        """How fast a stage is; what is too slow is noted."""
        self.num_tried += 1
        if (trials := self._space.trials) is not None:
            trials.left = max(0, trials.left - 1)
        rate = self._space.rates[crew].of(interval)
        for seconds in (rate.seconds_per_sample, rate.recomputed_seconds_per_sample):
            if seconds > self.limit_s:
                self._too_slow(seconds)
        return rate

    def _too_slow(self, seconds_per_sample: float) -> None:
        """Notes what a stage takes that does not keep to the limit."""
        if seconds_per_sample < self.next_limit_s:
            self.next_limit_s = seconds_per_sample


def _add(ways: list[Way], new: Way, usage: DeviceCounts) -> None:
    """Adds a way to others, unless one of them is as good, and drops those that are worse."""
    if not any(_is_as_good(way, new, usage) for way in ways):
        ways[:] = [way for way in ways if not _is_as_good(new, way, usage)]
        ways.append(new)


def _is_as_good(one: Way, other: Way, usage: DeviceCounts) -> bool:
    return (
        one.need <= other.need
        and one.offset <= other.offset
        and usage.is_no_more(one.used, other.used)
    )
