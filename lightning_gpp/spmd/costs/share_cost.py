"""Seconds as a function of the devices' shares.

Whatever a device does costs ``constant + slope * its part of the units``; an instruction takes as
long as its slowest device. So every cost is a largest of lines: the search evaluates it for given
shares, and its minimum over the shares is a linear program (HAP, equation 3, with the constants
that the release leaves out).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.spmd.placement import Placement, units_per_device

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ShareLine:
    """A line per device over its part.

    Attributes:
        constant_s: seconds whatever the part, shape ``(num_devices,)``.
        slope_s: seconds for all units, shape ``(num_devices,)``.
        units: how many units the shares deal; 0 where nothing is dealt.
    """

    constant_s: Vector
    slope_s: Vector
    units: int = 0


ShareCost = tuple[ShareLine, ...]
"""The largest of lines over all devices; at least one."""


class Parts:
    """The parts that shares come to in whole units.

    Args:
        shares: of the devices.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self.shares = tuple(shares)
        self.num_devices = len(self.shares)
        self._parts: dict[int, Vector] = {0: np.zeros(self.num_devices)}

    def of(self, units: int) -> Vector:
        """The part of the units that each device gets, shape ``(num_devices,)``."""
        if units not in self._parts:
            counts = units_per_device(units, self.shares)
            self._parts[units] = np.array(counts) / units
        return self._parts[units]

    def of_placement(self, placement: Placement) -> Vector:
        """The part of a tensor's bytes that each device has."""
        if not placement.is_shard:
            return np.ones(self.num_devices)
        assert placement.units is not None
        return self.of(placement.units)

    def seconds(self, cost: ShareCost) -> float:
        """What a cost comes to: as long as the slowest device takes."""
        return float(self.seconds_each(cost).max())

    def seconds_each(self, cost: ShareCost) -> Vector:
        """What a cost comes to on every device, shape ``(num_devices,)``."""
        lines = [line.constant_s + line.slope_s * self.of(line.units) for line in cost]
        found: Vector = np.maximum.reduce(lines)
        return found
