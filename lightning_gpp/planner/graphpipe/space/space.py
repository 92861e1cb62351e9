"""What stays the same for all limits: the places, the devices, and running sums over both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.rates import Rates
from lightning_gpp.planner.graphpipe.space.usage import DeviceCounts


class Space:
    """The divisions of a line to choose from with one smallest micro-batch.

    Args:
        num_places: units in the line.
        rates: what stages take.
        crews: the devices that a stage may have.
        usage: counts devices.
        num_units: smallest micro-batches of a mini-batch.
        holds_all: whether stages hold the activations of all micro-batches, as with ``gpipe``.
        memory_bytes: of all devices together; infinite where it is not known.
        may_recompute: whether stages may compute activations again instead of keeping them.
        tries_all: whether stages of any length are tried, and not the longest ones alone.

    Attributes:
        load: what all units take at least.
    """

    def __init__(
        self,
        num_places: int,
        rates: Rates,
        crews: Sequence[Crew],
        usage: DeviceCounts,
        num_units: int,
        *,
        holds_all: bool = False,
        memory_bytes: float = math.inf,
        may_recompute: bool = False,
        tries_all: bool = False,
    ) -> None:
        self.num_places = num_places
        self.rates = rates
        self.crews = crews
        self.usage = usage
        self.num_units = num_units
        self.holds_all = holds_all
        self.tries_all = tries_all
        self._memory_bytes = memory_bytes
        self._may_recompute = may_recompute
        self.load = rates.load(tuple(crews), usage.num_devices)

    def in_flight(self, units: int, crew: Crew) -> int:
        """Micro-batches of a stage in flight: no more than there are."""
        most = self.num_units if self.holds_all else min(units, self.num_units)
        return most // crew.multiple

    @cached_property
    def may_fit(self) -> bool:
        """Whether all devices together have the memory that any division takes at least.

        Every parameter is on a device, and activations are kept, of one micro-batch or of all.
        """
        kept_bytes = self.rates.contents[0, self.num_places].kept_bytes
        least_bytes = kept_bytes + self.load.activation_bytes(self._least_in_flight)
        return least_bytes * (1 - ROUNDING) <= self._memory_bytes

    def _least_in_flight(self, crew: Crew) -> int:
        return 1 if self._may_recompute else self.in_flight(crew.multiple, crew)
