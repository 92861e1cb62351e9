"""What a search is limited to: nothing, or what a published way of training does.

Baselines are searches that may choose less, so they are compared by the same theory and prices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, SpmdValue, ValueSource
from lightning_gpp.spmd.placement import R_SAME, Placement
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
    """Of every value the shards that hold samples: what an input's first dimension becomes.

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
