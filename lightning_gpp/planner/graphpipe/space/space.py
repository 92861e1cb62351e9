"""What stays the same for all limits: frames, the devices, and running sums over both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.frames import Frame, Frames
from lightning_gpp.planner.graphpipe.space.layout import ElementRun, Interval
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
        self.root = frames.root
        self._paths: dict[tuple[Crew, int], list[float]] = {}
        self._load = rates.load(tuple(crews), usage.num_devices)

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

    @property
    def work(self) -> list[float]:
        """Running sums over the places of device-seconds per sample that units take at least."""
        return self._load.work

    @property
    def lower_bound_s(self) -> float:
        """Seconds per sample that no division can beat."""
        return self._load.lower_bound_s

    def work_before(self, frame: Frame, boundary: int) -> float:
        """Device-seconds per sample of what cannot be behind a boundary, nor beside what is.

        In the frame of a branch that is cut on its own also all that is outside of it.
        """
        root = frame
        while root.outer is not None:
            root = root.outer
        own = (*frame.before, (frame.run.start, frame.run.bounds[boundary]))
        inside = root.run.bounds[-1], len(self.work) - 1
        outside = ((0, root.run.start), inside)
        return sum(self.work[stop] - self.work[start] for start, stop in (*own, *outside))

    def seconds(self, intervals: Iterable[Interval], crew: Crew) -> float:
        """Seconds per sample that a stage of some places takes at least."""
        sums = self.rates.least_seconds(crew)
        return sum([sums[stop] - sums[start] for start, stop in intervals])

    def path(self, crew: Crew, frame: Frame) -> list[float]:
        """Seconds per sample from a frame's beginning to it, and to every point of its trunk."""
        found = self._paths.get((crew, frame.number))
        if found is None:
            ends = range(len(frame.trunk))
            found = [0.0, *(self.seconds(frame.stage(0, end), crew) for end in ends)]
            self._paths[crew, frame.number] = found
        return found
