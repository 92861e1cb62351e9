"""Placements: what every device holds of a tensor, and of its gradient.

=========  ==============================  ==================================  ====================
text       a device holds of the tensor    a device holds of the gradient      in HAP
=========  ==============================  ==================================  ====================
``R=``     all of it                       all of it                           --
``R``      all of it                       a summand                           Identity
``S0``     its rows (of dimension 0)       the same rows                       Gather(0)
``P``      a summand                       all of it                           Reduce
=========  ==============================  ==================================  ====================

``R`` and ``P`` are each other's dual, ``R=`` and ``S`` their own: the local backward of the local
operator turns the gradients' right column at its outputs into that at its inputs, so a rule that is
sound forwards needs none of its own backwards. Tensors without a gradient have no ``R``: it is
``R=``.

Names are those of ``torch.distributed.tensor`` (Replicate, Shard, Partial).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


class PlacementKind(Enum):
    """The four ways to hold a tensor; see the module."""

    REPLICATE = "R="
    REPLICATE_SUMMED = "R"
    SHARD = "S"
    PARTIAL = "P"

    __hash__ = object.__hash__  # Enum's own, of the name, is slow; searches look up placements


@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor lies on all devices.

    A sharded dimension is seen as ``(outer, units, block)``, its length the product of the three,
    and the *units* are divided over the devices in order: device ``i`` has units
    ``[start_i, start_{i+1})`` of each of the ``outer`` parts, ``block`` elements each. Then views
    carry a shard through exactly::

        (batch, heads * width)  units=heads, block=width      ->  (batch, heads, width) units=heads
        (3 * heads * width)     outer=3, units=heads          ->  (3, heads, width) dim 1

    How many units each device gets follows from the units and the shares alone
    (:func:`units_per_device`), so what is divided alike lies alike.

    Attributes:
        kind: one of the four.
        dim: the sharded dimension, counted from the front; None unless sharded.
        units: number of units of the dimension; None unless sharded.
        outer: number of parts of the dimension that are each divided; 1 unless sharded.

    >>> str(R_SAME), str(R_SUMMED), str(PARTIAL), str(shard(0, 32)), str(shard(2, 12, outer=3))
    ('R=', 'R', 'P', 'S0/32', 'S2/3x12')
    """

    kind: PlacementKind
    dim: int | None = None
    units: int | None = None
    outer: int = 1

    def __str__(self) -> str:
        if self.kind is not PlacementKind.SHARD:
            return str(self.kind.value)
        outer = f"{self.outer}x" if self.outer > 1 else ""
        return f"S{self.dim}/{outer}{self.units}"

    @property
    def is_shard(self) -> bool:
        """Whether the devices have different parts."""
        return self.kind is PlacementKind.SHARD

    @property
    def is_replicated(self) -> bool:
        """Whether every device has the whole tensor."""
        return self.kind in (PlacementKind.REPLICATE, PlacementKind.REPLICATE_SUMMED)

    @property
    def dual(self) -> Placement:
        """Placement of the gradient, seen as a tensor."""
        if self.kind is PlacementKind.REPLICATE_SUMMED:
            return PARTIAL
        return R_SUMMED if self.kind is PlacementKind.PARTIAL else self

    def block(self, length: int) -> int:
        """Elements of a unit in a dimension of a length.

        Raises:
            ValueError: the dimension cannot be cut so.
        """
        parts = self.outer * (self.units or 1)
        if length % parts:
            raise ValueError(f"a dimension of length {length} cannot be divided as {self}")
        return length // parts


R_SAME = Placement(PlacementKind.REPLICATE)
"""Replicated, the gradient replicated as well."""

R_SUMMED = Placement(PlacementKind.REPLICATE_SUMMED)
"""Replicated; the gradients of the devices sum to the gradient."""

PARTIAL = Placement(PlacementKind.PARTIAL)
"""The tensors of the devices sum to the tensor; the gradient is replicated."""


def shard(dim: int, units: int, *, outer: int = 1) -> Placement:
    """A sharded dimension; arguments as the attributes of :class:`Placement`."""
    return Placement(PlacementKind.SHARD, dim, units, outer)


@lru_cache(maxsize=1 << 14)
def units_per_device(units: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Whole units for every device, close to its share.

    Every device gets the whole part of its share; the units left over go one by one to the device
    with the most missing (largest remainders, HAP's ``sharding_round``). Where there are enough,
    every device gets at least one: what was meant to be little does not become nothing by rounding.

    Args:
        units: how many there are.
        shares: of every device; above 0, they sum to 1.

    Raises:
        ValueError: the shares do not sum to 1, or one is not above 0.

    >>> units_per_device(10, (0.5, 0.3, 0.2)), units_per_device(3, (0.9, 0.05, 0.05))
    ((5, 3, 2), (1, 1, 1))
    >>> units_per_device(2, (0.4, 0.35, 0.25))
    (1, 1, 0)
    """
    check_shares(shares)
    devices = range(len(shares))
    counts = [int(units * share + ROUNDING) for share in shares]
    for _ in range(units - sum(counts)):
        missing = [units * share - count for share, count in zip(shares, counts)]
        counts[max(devices, key=lambda i: (missing[i], -i))] += 1
    if units >= len(shares):
        for empty in [i for i in devices if not counts[i]]:
            richest = max(devices, key=lambda i: (counts[i] - units * shares[i], counts[i]))
            if counts[richest] < 2:
                richest = max(devices, key=lambda i: counts[i])
            counts[richest] -= 1
            counts[empty] += 1
    return tuple(counts)


ROUNDING = 1e-9
"""A share within this of a whole number of units is that number: 0.3 of 10 is 3."""


def check_shares(shares: Sequence[float]) -> None:
    """Refuses what are no parts of a whole.

    Raises:
        ValueError: the text has the shares.
    """
    if not shares or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(
            "shares must be numbers above 0, one per device, that sum to 1; got "
            f"{[round(share, 6) for share in shares]}, which sum to {sum(shares):.6g}: "
            "divide each by their sum, and leave devices out that are to have none"
        )
