"""How many devices what follows a boundary may use, so that what precedes it finds enough.

For one limit on every stage's seconds per sample, the fewest devices that what precedes a boundary
needs at least: by its work, and by stages that compute and sum gradients only, which are as long
as the limit lets them be (messages, memory and micro-batches in flight do not count). A way that
uses more than the rest cannot be part of a division.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.frames import Frame
from lightning_gpp.planner.graphpipe.space.space import Space
from lightning_gpp.planner.graphpipe.tolerances import DEVICES, LEAST


class Rooms:
    """The rooms of all boundaries for one limit.

    Args:
        space: what is divided.
        limit_s: most seconds per sample of a stage.

    Attributes:
        next_limit_s: the least limit seen so far at which what precedes a boundary may need fewer
            devices because a stage may hold more.
        next_work_s: the same, because a device may do more work.
    """

    def __init__(self, space: Space, limit_s: float) -> None:
        self._space = space
        self._limit_s = limit_s * (1 + LEAST)
        self._fewest: dict[int, list[int]] = {}
        self._ends: dict[int, list[list[int]]] = {}
        self._stops: dict[int, list[list[int]]] = {}
        self._found: dict[int, list[int]] = {}
        self.next_limit_s = self.next_work_s = math.inf

    def of(self, frame: Frame) -> list[int]:
        """Devices that what follows each boundary may use, from the first to the last one."""
        found = self._found.get(frame.number)
        if found is None:
            most = self._most(frame)
            fewest = self.fewest_before(frame)[frame.num_before :]
            found = self._found[frame.number] = [most - count for count in fewest]
        return found

    def fewest_before(self, frame: Frame) -> list[int]:
        """Fewest devices before each boundary on the way to a frame, and in it.

        Where nothing is fast enough, one more than there are.
        """
        found = self._fewest.get(frame.number)
        if found is None:
            outer = frame.outer
            found = self.fewest_before(outer)[: frame.num_before + 1] if outer else [0]
            self._extend(found, frame)
            self._fewest[frame.number] = found
        return found

    def stops(self, frame: Frame) -> list[list[int]]:
        """How many points of a frame's trunk a stage may end at, from every boundary on every crew.

        As far as it computes and sums gradients only.
        """
        found = self._stops.get(frame.number)
        if found is None:
            self.fewest_before(frame)
            size, crews = len(frame.run), self._space.crews
            found = self._stops[frame.number] = [
                row
                if max(row) < size or len(frame.trunk) == size
                else [self._stop(frame, place, *one) for one in zip(crews, row)]
                for place, row in zip(frame.run.bounds, self._ends[frame.number])
            ]
        return found

    def _stop(self, frame: Frame, place: int, crew: Crew, end: int) -> int:
        """The same for one crew that reaches some boundary of the frame."""
        size = len(frame.run)
        if end < size:
            return end
        path, begin_s = self._space.path(crew, frame), self._space.rates.least_seconds(crew)[place]
        stop = bisect_right(path, begin_s + self._limit_s, size)
        if stop < len(path):
            self.note(path[stop] - begin_s)
        return stop

    def _extend(self, fewest: list[int], frame: Frame) -> None:
        """Adds the counts of a frame's own boundaries to those on the way to it.

        The first boundaries are the starts of stages; for each it is noted how far they go.
        """
        crews, first, last = self._space.crews, frame.num_before, len(frame.starts) - 1
        leads = [(crew.num_replicas, self._space.lead(crew, frame)) for crew in crews]
        work, starts, limit_s = self._space.work_lead(frame), frame.starts, self._limit_s
        smallest = min(crew.num_replicas for crew in crews)
        found = [self._space.usage.num_devices + 1] * (last + 2)  # where the longest stages end
        ends: list[list[int]] = []
        next_s = self.next_limit_s
        for start in range(last + 1):
            if start > first:
                least = max(fewest[-1], min(found[start:]))
                if starts[start] < start:  # a block can be divided in many ways
                    least = max(least, self.devices(work[start], least))
                fewest.append(least)
            begin = fewest[starts[start]]
            row = []
            for num_replicas, lead in leads:
                end = bisect_right(lead, lead[start] + limit_s, start) - 1
                if end < last and lead[end + 1] - lead[start] < next_s:
                    next_s = lead[end + 1] - lead[start]
                if begin + num_replicas < found[end]:
                    found[end] = begin + num_replicas
                row.append(end - first)
            ends.append(row)
            if start < last and starts[start + 1] == start:
                # a stage may begin in the block that is next, so it may hold some of it
                found[start + 1] = min(found[start + 1], begin + smallest)
        self._ends[frame.number] = ends[first:]
        self.note(next_s)

    def note(self, seconds_per_sample: float) -> None:
        """Notes what a stage takes that does not keep to the limit."""
        if seconds_per_sample < self.next_limit_s:
            self.next_limit_s = seconds_per_sample

    def _most(self, frame: Frame) -> int:
        """Devices for a frame and what it is in: what a branch beside an owner leaves to others."""
        root = frame
        while root.outer is not None:
            root = root.outer
        start, stop = root.run.interval
        work = self._space.work
        others = work[-1] - (work[stop] - work[start])
        return self._space.usage.num_devices - self.devices(others, 0)

    def devices(self, work: float, known: int) -> int:
        """Fewest devices for some device-seconds of work per sample, if more than are known."""
        if work <= 0:
            return 0
        count = math.ceil(work / self._limit_s - DEVICES)
        if count > max(1, known):
            self.next_work_s = min(self.next_work_s, work / (count - 1))
        return count
