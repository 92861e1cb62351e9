"""How many devices what follows a boundary may use, so that what precedes it finds enough.

For one limit on every stage's seconds per sample, the fewest devices that what precedes a boundary
needs at least: by its work, and by stages that compute and sum gradients only, which are as long
as the limit lets them be (messages, memory and micro-batches in flight do not count). A way that
uses more than the rest cannot be part of a division.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate

from lightning_gpp.planner.graphpipe.frames import Frame
from lightning_gpp.planner.graphpipe.layout import Run
from lightning_gpp.planner.graphpipe.rates import Crew
from lightning_gpp.planner.graphpipe.space import Space

TOLERANCE = 1e-9
"""A stage is taken to be fast enough up to this part above the limit."""


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
        self._limit_s = limit_s * (1 + TOLERANCE)
        self._fewest: dict[int, list[int]] = {}
        self._apart: dict[tuple[Run, ...], int] = {}
        self._may_share: dict[tuple[Run, ...], list[float]] = {}
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

    def fewest_apart(self, runs: tuple[Run, ...]) -> int:
        """Fewest devices of branches that no other stage takes anything from."""
        if self._space.is_small:
            return 0
        found = self._apart.get(runs)
        if found is None:
            alone = [self._fewest_alone(run)[-1] for run in runs]
            found = self._apart[runs] = self._together(runs, alone, 0.0)
        return found

    def fewest_beside(self, runs: tuple[Run, ...], crew: Crew, left_s: float) -> int:
        """Fewest devices of branches beside a stage that has some time left for pieces of them.

        Args:
            runs: the branches.
            crew: the devices of the stage.
            left_s: seconds per sample that it may take in.
        """
        if self._space.is_small:
            return 0
        sums = self._space.rates.least_seconds(crew)
        alone = []
        for run in runs:
            end_s = sums[run.bounds[-1]] - left_s - self._limit_s * TOLERANCE
            size = bisect_left(run.bounds, end_s, key=sums.__getitem__)
            if size:
                self._note(end_s - sums[run.bounds[size - 1]] + self._limit_s)
            alone.append(self._fewest_alone(run)[size])
        return self._together(runs, alone, crew.num_replicas * left_s)

    def _fewest_alone(self, run: Run) -> list[int]:
        return self.fewest_before(self._space.side_frame(run))

    def _together(self, runs: tuple[Run, ...], alone: list[int], done: float) -> int:
        """Fewest devices of branches that have been given so many each, and work is done for."""
        if len(runs) == 1:
            return alone[0]
        work = sum(self._space.work[run.bounds[-1]] - self._space.work[run.start] for run in runs)
        least = max(*alone, math.ceil(sum(map(min, alone, self._shares(runs))) - 1e-6))
        return max(least, self._devices(work - done, least))

    def _shares(self, runs: tuple[Run, ...]) -> list[float]:
        """Devices for each branch at least where it is in one stage with others."""
        found = self._may_share.get(runs)
        if found is None:
            rates, limit_s = self._space.rates, self._limit_s
            found = [math.inf] * len(runs)
            for crew in self._space.crews:
                sums = rates.least_seconds(crew)
                each = [sums[run.bounds[-1]] - sums[run.start] for run in runs]
                together = [*accumulate(sorted(each))]
                most = bisect_right(together, limit_s)
                if most < len(runs):
                    self._note(together[most])
                if most > 1:
                    by_time = [crew.num_replicas * s / limit_s for s in each]
                    by_count = [crew.num_replicas / most] * len(runs)
                    found = [*map(min, found, max(by_time, by_count, key=sum))]
            self._may_share[runs] = found
        return found

    def _extend(self, fewest: list[int], frame: Frame) -> None:
        """Adds the counts of a frame's own boundaries to those on the way to it."""
        space, limit_s = self._space, self._limit_s
        leads = [(crew.num_replicas, space.lead(crew, frame)) for crew in space.crews]
        work = space.work_lead(frame)
        too_many = space.usage.num_devices + 1
        for end in range(len(fewest), len(work)):
            least = too_many
            for num_replicas, lead in leads:
                first = bisect_left(lead, lead[end] - limit_s, 0, end)
                if first:
                    self._note(lead[end] - lead[first - 1])
                start = frame.starts[first]
                if start < end:
                    least = min(least, fewest[start] + num_replicas)
            least = max(least, fewest[-1])
            fewest.append(max(least, self._devices(work[end], least)))

    def _note(self, seconds_per_sample: float) -> None:
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
        return self._space.usage.num_devices - self._devices(others, 0)

    def _devices(self, work: float, known: int) -> int:
        """Fewest devices for some device-seconds of work per sample, if more than are known."""
        if work <= 0:
            return 0
        count = math.ceil(work / self._limit_s - 1e-6)
        if count > max(1, known):
            self.next_work_s = min(self.next_work_s, work / (count - 1))
        return count
