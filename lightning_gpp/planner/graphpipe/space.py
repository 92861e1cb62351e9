"""What stays the same for all limits: frames, the devices, and running sums over both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

from lightning_gpp.planner.graphpipe.branches import Branches
from lightning_gpp.planner.graphpipe.frames import Frame, Frames
from lightning_gpp.planner.graphpipe.layout import Run
from lightning_gpp.planner.graphpipe.rates import Crew, Rates
from lightning_gpp.planner.graphpipe.usage import Usage


class Space:
    """The divisions to choose from with one smallest micro-batch: frames and crews."""

    def __init__(
        self,
        frames: Frames,
        rates: Rates,
        crews: Sequence[Crew],
        usage: Usage,
        num_units: int,
        *,
        holds_all: bool = False,
    ) -> None:
        self.frames = frames
        self.layout = frames.layout
        self.rates = rates
        self.crews = crews
        self.usage = usage
        self.num_units = num_units
        self.holds_all = holds_all
        self.is_small = frames.is_small
        self.is_large = frames.is_large
        self.root = frames.root
        self.beginnings = frames.beginnings
        self._paths: dict[tuple[Crew, int], list[float]] = {}
        self._leads: dict[tuple[Crew, int], list[float]] = {}
        self._work_leads: dict[int, list[float]] = {}

    def in_flight(self, units: int, crew: Crew) -> int:
        """Micro-batches of a stage in flight: no more than there are."""
        most = self.num_units if self.holds_all else min(units, self.num_units)
        return most // crew.multiple

    def side_frame(self, run: Run) -> Frame:
        """The frame of a branch that is cut on its own, the same for all branches like it."""
        return self.frames.side(run)

    @cached_property
    def branches(self) -> Branches:
        """What whole branches take."""
        return Branches(self.rates, self.crews, self.work)

    @cached_property
    def work(self) -> list[float]:
        """Running sums over the places of device-seconds per sample that units take at least."""
        each = [
            [crew.num_replicas * step_s for step_s in self.rates.least_each(crew)]
            for crew in self.crews
        ]
        return [*accumulate(columns_min(each), initial=0.0)]

    @cached_property
    def lower_bound_s(self) -> float:
        """Seconds per sample that no division can beat: equal shares, or the slowest units."""
        each_s = columns_min([self.rates.least_each(crew) for crew in self.crews])
        num_stages = self.usage.num_devices // min(crew.num_replicas for crew in self.crews)
        slowest_s = crowded_s(each_s, num_stages) if len(self.crews) == 1 else max(each_s)
        return max(self.work[-1] / self.usage.num_devices, slowest_s)

    def work_lead(self, frame: Frame) -> list[float]:
        """Running work before the boundaries on the way to a frame, and before its own."""
        found = self._work_leads.get(frame.number)
        if found is None:
            found = self._work_leads[frame.number] = _lead(self.work, frame)
        return found

    def lead(self, crew: Crew, frame: Frame) -> list[float]:
        """Running seconds (see ``CrewRates.least_seconds``) before the same boundaries."""
        key = crew, frame.number
        found = self._leads.get(key)
        if found is None:
            found = self._leads[key] = _lead(self.rates.least_seconds(crew), frame)
        return found

    def path(self, crew: Crew, frame: Frame) -> list[float]:
        """Running seconds at the points of a frame's trunk (see ``Rates.least_seconds``)."""
        key = crew, frame.number
        path = self._paths.get(key)
        if path is None:
            sums = self.rates.least_seconds(crew)
            stop = sums[frame.run.bounds[-1]]
            path = self._paths[key] = [
                sums[frame.run.bounds[point.boundary]]
                if point.frame is frame and not point.crossed
                else stop + sum(sums[b] - sums[a] for a, b in point.beyond)
                for point in frame.trunk
            ]
        return path


def crowded_s(each_s: Sequence[float], num_stages: int) -> float:
    """Seconds that some stage takes at least: of more units than stages, two are in one.

    And of more than twice as many units three, and so on; so it holds at least the lightest of the
    heaviest that cannot be without such company.

    Args:
        each_s: seconds of every unit.
        num_stages: most stages.

    >>> crowded_s([4, 3, 3, 2], num_stages=2), crowded_s([5, 1], num_stages=2)
    (6, 5)
    """
    heaviest = sorted(each_s, reverse=True)
    return max(
        sum(heaviest[first - first // num_stages : first + 1])
        for first in range(0, len(heaviest), num_stages)
    )


def columns_min(rows: Sequence[Sequence[float]]) -> Sequence[float]:
    """The least of every column of some rows."""
    return list(map(min, *rows)) if len(rows) > 1 else rows[0]


def _lead(sums: Sequence[float], frame: Frame) -> list[float]:
    """Running sums over the places on the way to a frame's boundaries."""
    lead = _lead(sums, frame.outer)[: frame.num_before + 1] if frame.outer else [0.0]
    so_far = lead[-1] - sums[frame.run.start]
    return [*lead, *(so_far + sums[bound] for bound in frame.run.bounds[1:])]
