"""What it takes to have a tensor in another placement.

The placements in which a tensor is there are a set, written as the bits of a number (bit ``i``: the
``i``-th of its placements). Values of the same size, type and placements share a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from lightning_gpp.spmd.costs.prices import Price, PriceList
from lightning_gpp.spmd.operator_graph import SpmdValue
from lightning_gpp.spmd.placement import R_SUMMED, Placement
from lightning_gpp.spmd.program import is_summed_later
from lightning_gpp.spmd.search.limits import Allowed

TIE = 1e-10
"""Part by which a conversion counts as longer that devices wait for: of programs that cost the same
the one is taken whose sums of gradients go on beside the backward."""


@dataclass(frozen=True, slots=True)
class Obtained:
    """A way to have a value in a placement.

    Attributes:
        seconds: that it takes.
        memory_bytes: that it leaves on all devices with a limit.
        placements: in which the value is there then, as bits.
        path: the conversions, as (from, to) places among the placements.
    """

    seconds: float
    memory_bytes: float
    placements: int
    path: tuple[tuple[int, int], ...] = ()

    def then(self, other: Obtained) -> Obtained:
        """Both, one after the other."""
        return Obtained(
            self.seconds + other.seconds,
            self.memory_bytes + other.memory_bytes,
            self.placements | other.placements,
            self.path + other.path,
        )


class ValueTable:
    """Conversions of values of a kind.

    Args:
        value: one of them.
        placements: all that it may be in.
        prices: of conversions.
        limited: devices with a limit of memory.
        begun: placements that the value may be given in (a parameter's storage, an input), with
            their prices; empty for what operators make.
        allowed: which conversions may be made.
    """

    def __init__(
        self,
        value: SpmdValue,
        placements: tuple[Placement, ...],
        prices: PriceList,
        limited: Sequence[int],
        begun: Iterable[tuple[Placement, Price]],
        allowed: Allowed,
    ) -> None:
        self.placements = placements
        self._places = range(len(placements))
        self._ways: dict[tuple[int, int], list[Obtained]] = {}
        self._beginnings = [
            Obtained(price.seconds, price.held_bytes(limited), 1 << placements.index(placement))
            for placement, price in begun
        ]
        self._direct: dict[tuple[int, int], Obtained] = {}
        for i, j in product(self._places, self._places):
            one, other = placements[i], placements[j]
            if not (can_convert(value, one, other) and allowed.conversion(value, one, other)):
                continue
            price = prices.move(value, one, other)
            seconds = price.seconds * (1.0 if is_summed_later(value, one, other) else 1 + TIE)
            way = Obtained(seconds, price.held_bytes(limited), 1 << i | 1 << j, ((i, j),))
            self._direct[i, j] = way

    def ways(self, placements: int, targets: Sequence[int]) -> list[Obtained]:
        """Ways to have the value in some placements.

        Args:
            placements: in which it is there, as bits; 0 if it has not begun.
            targets: the placements wanted.
        """
        found = [Obtained(0.0, 0.0, placements)]
        for target in targets:
            found = [
                way.then(more) for way in found for more in self._ways_to(way.placements, target)
            ]
        return found

    def _ways_to(self, placements: int, target: int) -> list[Obtained]:
        key = placements, target
        if key not in self._ways:
            starts = [Obtained(0.0, 0.0, placements)] if placements else self._beginnings
            self._ways[key] = _without_worse(
                start.then(step) for start in starts for step in self._steps(start, target)
            )
        return self._ways[key]

    def _steps(self, start: Obtained, target: int) -> Iterator[Obtained]:
        """From where it is: directly, or by one placement between."""
        if start.placements >> target & 1:
            yield Obtained(0.0, 0.0, start.placements)
            return
        for source in self._places:
            if start.placements >> source & 1:
                if way := self._direct.get((source, target)):
                    yield way
                for middle in self._places:
                    one, two = (
                        self._direct.get((source, middle)),
                        self._direct.get((middle, target)),
                    )
                    if one and two:
                        yield one.then(two)


def _without_worse(ways: Iterable[Obtained]) -> list[Obtained]:
    """Without ways that another one is nowhere behind."""
    kept: list[Obtained] = []
    for way in sorted(ways, key=lambda each: (each.seconds, each.memory_bytes, -each.placements)):
        if not any(
            other.placements | way.placements == other.placements
            and other.memory_bytes <= way.memory_bytes
            for other in kept
        ):
            kept.append(way)
    return kept


def can_convert(value: SpmdValue, source: Placement, target: Placement) -> bool:
    """Whether there is a conversion; a value without a gradient has no ``R``.

    None of a dimension to one that is divided in other units: both are parts of the whole.
    """
    if source.is_shard and source.dim == target.dim:
        return False
    return source != target and (value.requires_grad or R_SUMMED not in (source, target))
