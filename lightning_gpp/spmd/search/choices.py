"""The limits of a search, and the conversions between placements.

Baselines are searches that may choose less, so they are compared by the same theory and prices.

The placements in which a tensor is there are a set, written as the bits of a number (bit ``i``: the
``i``-th of its placements). Values of the same size, type and placements share a table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from lightning_gpp.spmd.costs.prices import Price, PriceList
from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, SpmdValue, ValueSource
from lightning_gpp.spmd.placement import R_SAME, R_SUMMED, Placement
from lightning_gpp.spmd.program import is_summed_later
from lightning_gpp.spmd.rules.theory import Rule, Theory


class Allowed:
    """Everything; but parameters that are stored already are kept as they are.

    Args:
        storage: placement by name, whole where nothing is said; None: any.
    """

    def __init__(self, storage: Mapping[str, Placement] | None = None) -> None:
        self._storage = storage

    def rule(self, operator: SpmdOperator, rule: Rule) -> bool:
        """Whether an operator may be run so."""
        return True

    def storages(self, value: SpmdValue, every: Sequence[Placement]) -> tuple[Placement, ...]:
        """How a parameter may be kept, of every way to."""
        if self._storage is None:
            return tuple(every)
        return (self._storage.get(value.name, R_SAME),)

    def conversion(self, value: SpmdValue, source: Placement, target: Placement) -> bool:
        """Whether a value may be converted so."""
        return True


class DataParallel(Allowed):
    """Samples are divided, parameters are whole, their gradients are summed by an all-reduce.

    An operator that cannot be divided along the samples runs on all devices, one that can does not:
    where all do everything, nothing is trained in parallel, even if that is the fastest.

    Args:
        graph: the model.
        theory: of the graph.
    """

    def __init__(self, graph: SpmdGraph, theory: Theory) -> None:
        super().__init__({})
        self._samples = sample_shards(graph, theory)
        self._divided = frozenset(
            operator.name
            for operator in graph.operators
            if any(self._divides(operator, rule) for rule in theory.rules(operator))
        )

    def rule(self, operator: SpmdOperator, rule: Rule) -> bool:
        """Along the samples where that is possible, else not divided."""
        if operator.name in self._divided:
            return self._divides(operator, rule)
        return not any(placement.is_shard for placement in (*rule.inputs, *rule.outputs))

    def _divides(self, operator: SpmdOperator, rule: Rule) -> bool:
        """Whether a rule divides an operator along the samples, and nothing else."""
        shards = _shards(operator, rule)
        return bool(shards) and all(p in self._samples[name] for name, p in shards)

    def conversion(self, value: SpmdValue, source: Placement, target: Placement) -> bool:
        """Parameters are only read as they are."""
        is_read = value.source is ValueSource.PARAMETER
        return not (is_read and (source.is_shard or target.is_shard))


class ShardedDataParallel(DataParallel):
    """As data parallelism, with parameters that are kept in shards (ZeRO, Rajbhandari et al. 2020).

    They are gathered before they are read, and their gradients reduced and scattered. A parameter
    without a dimension that has a unit for every device is kept whole.
    """

    def storages(self, value: SpmdValue, every: Sequence[Placement]) -> tuple[Placement, ...]:
        """In shards of the first dimension that can be."""
        return tuple([placement for placement in every if placement.is_shard][:1] or every[:1])

    def conversion(self, value: SpmdValue, source: Placement, target: Placement) -> bool:
        """Parameters are gathered."""
        return value.source is not ValueSource.PARAMETER or target.is_replicated


def sample_shards(graph: SpmdGraph, theory: Theory) -> Mapping[str, set[Placement]]:
    """For every value, the shards that divide its samples.

    Samples are followed through the rules from the inputs on: a rule divides one factor, so where
    one of its tensors is divided by samples, all that it divides are.
    """
    found: defaultdict[str, set[Placement]] = defaultdict(set)
    for value in graph.of_source(ValueSource.INPUT):
        first = [p for p in theory.shards(value.name) if p.dim == 0 and p.outer == 1]
        found[value.name].update(first[:1])
    for operator in graph.operators:
        for rule in theory.rules(operator):
            shards = _shards(operator, rule)
            if any(placement in found[name] for name, placement in shards):
                for name, placement in shards:
                    found[name].add(placement)
    return found


def _shards(operator: SpmdOperator, rule: Rule) -> list[tuple[str, Placement]]:
    placed = operator.operands(rule.inputs, rule.outputs)
    return [(name, placement) for name, placement in placed if placement.is_shard]


TIE = 1e-10
"""Part by which a conversion counts as longer that devices wait for: of programs that cost the same
the one is taken whose sums of gradients go on beside the backward."""


@dataclass(frozen=True, slots=True)
class Obtained:
    """A way to get a value in a placement.

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
    """Conversions of one kind of values.

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
