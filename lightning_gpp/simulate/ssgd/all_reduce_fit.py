"""Measured all-reduce times as a line ``a + b * bytes``, and the links that give this line.

With the ring all-reduce of :mod:`lightning_gpp.cluster.collectives`, ``2 (d - 1)`` rounds of one
``d``-th of the bytes, links of latency ``a / (2 (d - 1))`` and bandwidth ``2 (d - 1) / (d b)`` make
a sum over ``d`` devices take exactly ``a + b * bytes``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lightning_gpp.cluster import Cluster, Link, uniform_cluster


@dataclass(frozen=True, slots=True)
class AllReduceFit:
    """A line through measured all-reduces of one number of devices.

    Attributes:
        startup_s: ``a``, seconds that every sum takes.
        per_byte_s: ``b``, seconds per byte besides.

    Raises:
        ValueError: a number makes no sense.
    """

    startup_s: float
    per_byte_s: float

    def __post_init__(self) -> None:
        if self.startup_s < 0 or self.per_byte_s <= 0:
            raise ValueError(
                "an all-reduce takes startup_s of at least 0 and per_byte_s above 0, got "
                f"startup_s={self.startup_s}, per_byte_s={self.per_byte_s}"
            )

    def seconds(self, size_bytes: float) -> float:
        """Seconds of a sum.

        >>> AllReduceFit(startup_s=0.5, per_byte_s=0.25).seconds(10)
        3.0
        """
        return self.startup_s + self.per_byte_s * size_bytes

    def cluster(self, num_devices: int, kind: str = "cpu") -> Cluster:
        """Equal devices whose ring all-reduce takes what was measured.

        Raises:
            ValueError: there are fewer than 2 devices, which have nothing to sum.
        """
        if num_devices < 2:
            raise ValueError(f"a sum needs at least 2 devices, got {num_devices}")
        rounds = 2 * (num_devices - 1)
        link = Link(rounds / (num_devices * self.per_byte_s), self.startup_s / rounds)
        return uniform_cluster(num_devices, link, kind)


PUBLISHED_FITS: Mapping[str, Mapping[int, AllReduceFit]] = MappingProxyType(
    {
        "56 Gbit/s InfiniBand": MappingProxyType(
            {
                2: AllReduceFit(2.55e-6, 9.84e-11),
                4: AllReduceFit(4.20e-5, 2.06e-10),
                8: AllReduceFit(9.75e-5, 3.06e-10),
                16: AllReduceFit(2.36e-4, 4.06e-10),
            }
        ),
        "10 Gbit/s Ethernet": MappingProxyType(
            {
                2: AllReduceFit(2.55e-6, 9.84e-11),
                4: AllReduceFit(4.20e-5, 2.06e-10),
                8: AllReduceFit(5.23e-4, 8.57e-10),
                16: AllReduceFit(9.08e-4, 7.40e-10),
            }
        ),
    }
)
"""Network -> number of GPUs -> fit, from the code published with MG-WFBP (INFOCOM 2019).

Four GPUs are in one node, so that 2 and 4 do not use the network and are the same in both.
"""
