"""What it takes to have a tensor in another placement.

The placements in which a tensor is there are a set, written as the bits of a number (bit ``i``: the
``i``-th of its placements). Values of the same size, type and placements share a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from lightning_gpp.spmd.costs.prices import Price, PriceList
from lightning_gpp.spmd.gradient_buckets import is_summed_later
from lightning_gpp.spmd.operator_graph import SpmdValue
from lightning_gpp.spmd.placement import Placement, PlacementKind
from lightning_gpp.spmd.program import Conversion

Memory = tuple[float, ...]
"""Bytes per class of devices."""

TIE = 1e-10
"""Part by which a conversion counts as longer that devices wait for: of programs that cost the same
the one is taken whose sums of gradients go on beside the backward."""


@dataclass(frozen=True, slots=True)
class Obtained:
    """A way to have a value in a placement.

    Attributes:
        seconds: that it takes.
        memory: bytes that it leaves.
        placements: in which the value is there then, as bits.
        path: the conversions, as (from, to) places among the placements.
    """

    seconds: float
    memory: Memory
    placements: int
    path: tuple[tuple[int, int], ...] = ()

    def then(self, other: Obtained) -> Obtained:
        """Both, one after the other."""
        return Obtained(
            self.seconds + other.seconds,
            tuple([a + b for a, b in zip(self.memory, other.memory)]),
            self.placements | other.placements,
            self.path + other.path,
        )


@dataclass(eq=False)
class ValueTable:
    """Conversions of values of a kind.

    Attributes:
        value: one of them.
        placements: all that it may be in.
        prices: of conversions.
        classes: of each class of devices that hold alike, one; empty where memory does not count.
        begun: placements that the value may be given in (a parameter's storage, an input), with
            their prices; empty for what operators make.
        allowed: whether a conversion may be made.
    """

    value: SpmdValue
    placements: tuple[Placement, ...]
    prices: PriceList
    classes: tuple[int, ...]
    begun: Iterable[tuple[Placement, Price]]
    allowed: Callable[[SpmdValue, Placement, Placement], bool]
    _direct: dict[tuple[int, int], Obtained] = field(init=False, repr=False)
    _shortest: dict[tuple[int, int], Obtained] = field(init=False, repr=False)
    _beginnings: list[Obtained] = field(init=False, repr=False)
    _ways: dict[tuple[int, int], list[Obtained]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        count = range(len(self.placements))
        self._beginnings = [
            self._priced(price, 1 << self.placements.index(placement))
            for placement, price in self.begun
        ]
        self._direct = {
            (i, j): self._conversion(i, j)
            for i, one in enumerate(self.placements)
            for j, other in enumerate(self.placements)
            if can_convert(self.value, one, other) and self.allowed(self.value, one, other)
        }
        self._shortest = dict(self._direct)
        for middle in count:  # Floyd-Warshall
            for i in count:
                for j in count:
                    if i == j or not {(i, middle), (middle, j)} <= self._shortest.keys():
                        continue
                    chain = self._shortest[i, middle], self._shortest[middle, j]
                    known = self._shortest.get((i, j))
                    if known is None or chain[0].seconds + chain[1].seconds < known.seconds:
                        self._shortest[i, j] = chain[0].then(chain[1])

    def _conversion(self, source: int, target: int) -> Obtained:
        one, other = self.placements[source], self.placements[target]
        price = self.prices.conversion(self.value, one, other)
        made = Conversion(self.value.name, one, other, price.method, price.backward_method)
        waits = 0.0 if is_summed_later(self.value, made) else TIE
        found = self._priced(price, 1 << source | 1 << target)
        return replace(found, seconds=found.seconds * (1 + waits), path=((source, target),))

    def _priced(self, price: Price, placements: int) -> Obtained:
        memory = price.memory_bytes[list(self.classes)]
        return Obtained(price.seconds, tuple(memory.tolist()), placements)

    def ways(self, placements: int, targets: Sequence[int]) -> list[Obtained]:
        """Ways to have the value in some placements.

        Args:
            placements: in which it is there, as bits; 0 if it has not begun.
            targets: the placements wanted.
        """
        found = [Obtained(0.0, (0.0,) * len(self.classes), placements)]
        for target in targets:
            found = [
                way.then(more) for way in found for more in self._ways_to(way.placements, target)
            ]
        return found

    def _ways_to(self, placements: int, target: int) -> list[Obtained]:
        key = placements, target
        if key not in self._ways:
            there = Obtained(0.0, (0.0,) * len(self.classes), placements)
            starts = [there] if placements else self._beginnings
            self._ways[key] = _without_worse(
                start.then(step) for start in starts for step in self._steps(start, target)
            )
        return self._ways[key]

    def _steps(self, start: Obtained, target: int) -> Iterable[Obtained]:
        """From where it is: directly, by one placement between, or by the shortest chain."""
        if start.placements >> target & 1:
            yield Obtained(0.0, (0.0,) * len(self.classes), start.placements)
            return
        places = range(len(self.placements))
        for source in places:
            if not start.placements >> source & 1:
                continue
            if (source, target) in self._shortest:
                yield self._shortest[source, target]
            if (source, target) in self._direct:
                yield self._direct[source, target]
            for middle in places:
                if {(source, middle), (middle, target)} <= self._direct.keys():
                    yield self._direct[source, middle].then(self._direct[middle, target])


def _without_worse(ways: Iterable[Obtained]) -> list[Obtained]:
    """Without ways that another one is nowhere behind."""
    kept: list[Obtained] = []
    for way in sorted(ways, key=lambda each: (each.seconds, each.memory, -each.placements)):
        if not any(
            other.placements | way.placements == other.placements
            and all(a <= b for a, b in zip(other.memory, way.memory))
            for other in kept
        ):
            kept.append(way)
    return kept


def can_convert(value: SpmdValue, source: Placement, target: Placement) -> bool:
    """Whether there is a conversion; a value without a gradient has no ``R``."""
    if not value.requires_grad and PlacementKind.REPLICATE_SUMMED in (source.kind, target.kind):
        return False
    return source != target
