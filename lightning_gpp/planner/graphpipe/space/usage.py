"""Devices in use, by kind, packed into one integer, so that a search adds and compares them fast.

Each kind of device has a field of bits with a guard bit on top: ``a`` is nowhere more than ``b``
iff no guard bit is borrowed by ``b + guards - a``.
"""

from __future__ import annotations

from collections.abc import Sequence


class DeviceCounts:
    """The fields of one cluster.

    Attributes:
        has_one_kind: whether all devices are of one kind.

    >>> usage = DeviceCounts((4, 2))
    >>> one = usage.of(3, kind=0) + usage.of(1, kind=1)
    >>> usage.fits(one, most=6), usage.fits(one + usage.of(2, kind=1), most=6)
    (True, False)
    """

    def __init__(self, available: Sequence[int]) -> None:
        self.num_devices = sum(available)
        self._bits = self.num_devices.bit_length() + 2  # of a field: twice as many, and the guard
        self._guards = sum(self.of(1, kind) << self._bits - 1 for kind in range(len(available)))
        self.available = sum(self.of(count, kind) for kind, count in enumerate(available))
        self.has_one_kind = len(available) == 1

    def of(self, count: int, kind: int) -> int:
        """A number of devices of one kind."""
        return count << (self._bits * kind)

    def fits(self, used: int, most: int) -> bool:
        """Whether no more is used than there is of each kind, and than ``most`` in all.

        Args:
            used: devices in use.
            most: at most ``num_devices``.
        """
        if self.has_one_kind:
            return used <= most
        return self.total(used) <= most and self.is_no_more(used, self.available)

    def is_no_more(self, used: int, other: int) -> bool:
        """Whether of no kind more devices are used than others use."""
        return ((other | self._guards) - used) & self._guards == self._guards

    def total(self, used: int) -> int:
        """Devices in use."""
        if self.has_one_kind:
            return used
        total = 0
        while used:
            total += used & (1 << self._bits) - 1
            used >>= self._bits
        return total
