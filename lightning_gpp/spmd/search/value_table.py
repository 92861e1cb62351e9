"""What it takes to have a tensor in another placement.

The placements in which a tensor is there are a set, written as the bits of a number (bit ``i``: the
``i``-th of its placements). Values of the same size, type and placements share a table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_gpp.spmd.costs.prices import PriceList
from lightning_gpp.spmd.operator_graph import SpmdValue
from lightning_gpp.spmd.placement import PARTIAL, Placement, PlacementKind

Memory = tuple[float, ...]
"""Bytes per class of devices."""


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


def plus(one: Memory, other: Memory) -> Memory:
    """The sum."""
    return tuple([a + b for a, b in zip(one, other)]) if one else one


@dataclass(eq=False)
class ValueTable:
    """Conversions of values of a kind.

    Attributes:
        value: one of them.
        placements: all that it may be in.
        prices: of conversions.
        classes: of each class of devices that are alike, one; empty without limits of memory.
        allowed: whether a conversion may be made.
        beginnings: placements that the value may be given in (a parameter's storage, an input),
            with their prices; empty for what operators make.
    """

    value: SpmdValue
    placements: tuple[Placement, ...]
    prices: PriceList
    classes: tuple[int, ...]
    beginnings: tuple[Obtained, ...] = ()
    allowed: Callable[[SpmdValue, Placement, Placement], bool] = lambda *_: True
    _direct: list[list[Obtained | None]] = field(init=False, repr=False)
    _shortest: list[list[Obtained]] = field(init=False, repr=False)
    _ways: dict[tuple[int, int, bool], tuple[Obtained, ...]] = field(
        init=False, repr=False, default_factory=dict
    )
    _no_lifts: np.ndarray = field(init=False, repr=False)
    _numbers: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    _lifts: dict[int, np.ndarray] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.placements)
        self._no_lifts = np.empty((1 + len(self.classes), 0))
        self._direct = [[self._conversion(i, j) for j in range(count)] for i in range(count)]
        self._shortest = self._closure()

    def memory(self, memory_bytes: np.ndarray) -> Memory:
        """The bytes of one device of each class."""
        return tuple(float(memory_bytes[device]) for device in self.classes)

    def _conversion(self, source: int, target: int) -> Obtained | None:
        one, other = self.placements[source], self.placements[target]
        if source == target or not can_convert(self.value, one, other):
            return None
        if not self.allowed(self.value, one, other):
            return None
        price = self.prices.conversion(self.value, one, other)
        bits = 1 << source | 1 << target
        return Obtained(price.seconds, self.memory(price.memory_bytes), bits, ((source, target),))

    def _closure(self) -> list[list[Obtained]]:
        """Shortest chains of conversions (Floyd-Warshall)."""
        count = len(self.placements)
        none = (0.0,) * len(self.classes)
        never = Obtained(float("inf"), none, 0)
        found = [[each or never for each in row] for row in self._direct]
        for i in range(count):
            found[i][i] = Obtained(0.0, none, 1 << i)
        for middle in range(count):
            for i in range(count):
                for j in range(count):
                    seconds = found[i][middle].seconds + found[middle][j].seconds
                    if seconds < found[i][j].seconds and i != j:
                        found[i][j] = _then(found[i][middle], found[middle][j])
        return found

    def ways(self, placements: int, target: int, is_last: bool) -> tuple[Obtained, ...]:
        """Ways to have the value in a placement.

        Args:
            placements: in which it is there, as bits; 0 if it has not begun.
            target: the placement wanted.
            is_last: whether nothing reads it later, so that only cost counts.
        """
        key = (placements, target, is_last)
        if key not in self._ways:
            self._ways[key] = tuple(self._find(placements, target, is_last))
        return self._ways[key]

    def _find(self, placements: int, target: int, is_last: bool) -> list[Obtained]:
        if placements >> target & 1:
            return [self._there(placements)]
        starts = [self._there(placements)] if placements else list(self.beginnings)
        found: list[Obtained] = []
        for start in starts:
            found += self._reached(start, target, is_last)
        if is_last and not self.classes:
            return [min(found, key=lambda way: way.seconds)] if found else []
        return _without_worse(found)

    def _there(self, placements: int) -> Obtained:
        return Obtained(0.0, (0.0,) * len(self.classes), placements)

    def _reached(self, start: Obtained, target: int, is_last: bool) -> list[Obtained]:
        """From where it is: directly, by one placement between, or by the shortest chain."""
        if start.placements >> target & 1:
            return [start]
        count = len(self.placements)
        sources = [i for i in range(count) if start.placements >> i & 1]
        steps: list[Obtained] = []
        for source in sources:
            steps.append(self._shortest[source][target])
            if (direct := self._direct[source][target]) is not None:
                steps.append(direct)
            if not is_last or self.classes:
                for middle in range(count):
                    one, other = self._direct[source][middle], self._direct[middle][target]
                    if one is not None and other is not None and middle not in sources:
                        steps.append(_then(one, other))
        return [_then(start, step) for step in steps if step.seconds < float("inf")]

    def number(self, placements: int) -> int:
        """The column of :meth:`lifts` of a value that is there in these placements (bits)."""
        return self._numbers.setdefault(placements, len(self._numbers))

    def lifts(self, wanted: int) -> np.ndarray:
        """At most what it takes to have the value in the wanted placements (bits) as well.

        Returns:
            Seconds, then bytes per class: a row each, a column per :meth:`number`; infinite where
            there is no way, or the value has begun at one side and not at the other.
        """
        found = self._lifts.get(wanted, self._no_lifts)
        known = found.shape[1]
        if known < len(self._numbers):
            new = itertools.islice(self._numbers, known, None)
            more = np.array([self._lift(has, wanted) for has in new]).T
            found = self._lifts[wanted] = np.hstack([found, more])
        return found

    def _lift(self, placements: int, wanted: int) -> tuple[float, ...]:
        seconds, memory = 0.0, (0.0,) * len(self.classes)
        if (not placements or not wanted) and placements != wanted:
            seconds = float("inf")
        count = len(self.placements) if placements else 0
        for target in range(count):
            if wanted >> target & 1 and not placements >> target & 1:
                best = min(
                    (self._shortest[i][target] for i in range(count) if placements >> i & 1),
                    key=lambda way: way.seconds,
                )
                seconds, memory = seconds + best.seconds, plus(memory, best.memory)
        return seconds, *memory


def _then(one: Obtained, other: Obtained) -> Obtained:
    return Obtained(
        one.seconds + other.seconds,
        plus(one.memory, other.memory),
        one.placements | other.placements,
        (*one.path, *other.path),
    )


def _without_worse(ways: Sequence[Obtained]) -> list[Obtained]:
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
    return not (source == PARTIAL and target == PARTIAL)
