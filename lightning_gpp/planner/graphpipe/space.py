"""What stays the same for all limits: a layout, the devices, and running sums over both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, count

from lightning_gpp.planner.graphpipe.layout import Frame, Layout, Run
from lightning_gpp.planner.graphpipe.rates import Crew, Rates
from lightning_gpp.planner.graphpipe.tails import Beginnings
from lightning_gpp.planner.graphpipe.usage import Usage

SMALL = 14
"""Up to this many units everything is tried; beyond, long stages are tried first."""

LARGE = 150
"""Above this many units only the heaviest branch of a block is tried as its owner."""

FEW_OWNERS = 2
"""In larger models, branches of a block that are tried as its owner, the heaviest first."""


class Space:
    """The divisions to choose from with one smallest micro-batch: frames and crews."""

    def __init__(
        self,
        layout: Layout,
        rates: Rates,
        crews: Sequence[Crew],
        usage: Usage,
        num_units: int,
        *,
        holds_all: bool = False,
    ) -> None:
        self.layout = layout
        self.rates = rates
        self.crews = crews
        self.usage = usage
        self.num_units = num_units
        self.holds_all = holds_all
        self.is_small = len(layout.order) <= SMALL
        self.is_large = len(layout.order) > LARGE
        self._numbers = count()
        self.root = self._frame(layout.root, is_model_end=True)
        self.beginnings = Beginnings()
        self._side_frames: dict[int, Frame] = {}
        self._paths: dict[tuple[Crew, int], list[float]] = {}

    def _frame(self, run: Run, *, is_model_end: bool) -> Frame:
        most = len(self.layout.order) if self.is_small else 1 if self.is_large else FEW_OWNERS
        return Frame(run, self._numbers, is_model_end=is_model_end, most_owners=most)

    def in_flight(self, units: int, crew: Crew) -> int:
        """Micro-batches of a stage in flight: no more than there are."""
        most = self.num_units if self.holds_all else min(units, self.num_units)
        return most // crew.multiple

    def side_frame(self, run: Run) -> Frame:
        """The frame of a branch that is cut on its own, the same for all branches like it."""
        frame = self._side_frames.get(run.kind)
        if frame is None:
            frame = self._side_frames[run.kind] = self._frame(run, is_model_end=False)
        return frame

    @cached_property
    def work(self) -> list[float]:
        """Running sums over the places of device-seconds per sample that units take at least."""
        sums = [(crew.num_replicas, self.rates.least_seconds(crew)) for crew in self.crews]
        places = range(len(self.layout.order))
        each = (min(count * (s[p + 1] - s[p]) for count, s in sums) for p in places)
        return [*accumulate(each, initial=0.0)]

    @cached_property
    def lower_bound_s(self) -> float:
        """Seconds per sample that no division can beat: equal shares, or the slowest unit."""
        sums = [self.rates.least_seconds(crew) for crew in self.crews]
        places = range(len(self.layout.order))
        slowest_s = max(min(s[place + 1] - s[place] for s in sums) for place in places)
        return max(self.work[-1] / self.usage.num_devices, slowest_s)

    def work_before(self, frame: Frame, boundary: int) -> float:
        """Device-seconds per sample of what comes before a boundary, in a frame and around it."""
        run, work = frame.run, self.work
        before = work[run.bounds[boundary]] - work[run.bounds[0]]
        return before + (self.work_before(frame.outer, frame.element) if frame.outer else 0.0)

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
