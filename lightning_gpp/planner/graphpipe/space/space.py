"""What stays the same for all limits: frames, the devices, and running sums over both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from lightning_gpp.planner.graphpipe.space.branches import Branches
from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.frames import Frame, Frames
from lightning_gpp.planner.graphpipe.space.layout import ElementRun
from lightning_gpp.planner.graphpipe.space.rates import Rates
from lightning_gpp.planner.graphpipe.space.usage import DeviceCounts
from lightning_gpp.planner.graphpipe.tolerances import SECONDS


class Space:
    """The divisions to choose from with one smallest micro-batch: frames and crews.

    Args:
        frames: where stages begin and end.
        rates: what stages take.
        crews: the devices that a stage may have.
        usage: counts devices.
        num_units: smallest micro-batches of a mini-batch.
        holds_all: whether stages hold the activations of all micro-batches, as with ``gpipe``.
        memory_bytes: of all devices together; infinite where it is not known.
        may_recompute: whether stages may compute activations again instead of keeping them.
    """

    def __init__(
        self,
        frames: Frames,
        rates: Rates,
        crews: Sequence[Crew],
        usage: DeviceCounts,
        num_units: int,
        *,
        holds_all: bool = False,
        memory_bytes: float = math.inf,
        may_recompute: bool = False,
    ) -> None:
        self.frames = frames
        self.layout = frames.layout
        self.rates = rates
        self.crews = crews
        self.usage = usage
        self.num_units = num_units
        self.holds_all = holds_all
        self._memory_bytes = memory_bytes
        self._may_recompute = may_recompute
        self.is_small = frames.is_small
        self.is_large = frames.is_large
        self.root = frames.root
        self.beginnings = frames.beginnings
        self._load = rates.load(tuple(crews), usage.num_devices)
        self._paths: dict[tuple[Crew, int], list[float]] = {}
        self._leads: dict[tuple[Crew, int], list[float]] = {}
        self._work_leads: dict[int, list[float]] = {}

    def in_flight(self, units: int, crew: Crew) -> int:
        """Micro-batches of a stage in flight: no more than there are."""
        most = self.num_units if self.holds_all else min(units, self.num_units)
        return most // crew.multiple

    @cached_property
    def may_fit(self) -> bool:
        """Whether all devices together have the memory that any division takes at least.

        Every parameter is on a device, and activations are kept, of one micro-batch or of all.
        """
        kept_bytes = self.rates.contents[(self.layout.root.interval,)].kept_bytes
        least_bytes = kept_bytes + self._load.activation_bytes(self._least_in_flight)
        return least_bytes * (1 - SECONDS) <= self._memory_bytes

    def _least_in_flight(self, crew: Crew) -> int:
        return 1 if self._may_recompute else self.in_flight(crew.multiple, crew)

    def side_frame(self, run: ElementRun) -> Frame:
        """The frame of a branch that is cut on its own, the same for all branches like it."""
        return self.frames.side(run)

    @cached_property
    def branches(self) -> Branches:
        """What whole branches take."""
        return Branches(self.rates, self.crews, self.work)

    @property
    def work(self) -> list[float]:
        """Running sums over the places of device-seconds per sample that units take at least."""
        return self._load.work

    @property
    def lower_bound_s(self) -> float:
        """Seconds per sample that no division can beat."""
        return self._load.lower_bound_s

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


def _lead(sums: Sequence[float], frame: Frame) -> list[float]:
    """Running sums over the places on the way to a frame's boundaries."""
    lead = _lead(sums, frame.outer)[: frame.num_before + 1] if frame.outer else [0.0]
    so_far = lead[-1] - sums[frame.run.start]
    return [*lead, *(so_far + sums[bound] for bound in frame.run.bounds[1:])]
