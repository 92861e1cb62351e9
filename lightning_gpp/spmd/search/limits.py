"""What a search is limited to: nothing, or what a published way of training does.

Baselines are searches that may choose less, so they are compared by the same theory and prices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, SpmdValue, ValueSource
from lightning_gpp.spmd.placement import Placement, PlacementKind
from lightning_gpp.spmd.program import Option
from lightning_gpp.spmd.rules.rule import Rule
from lightning_gpp.spmd.rules.theory import Theory


class Allowed:
    """Everything."""

    def rule(self, operator: SpmdOperator, rule: Rule) -> bool:
        """Whether an operator may be run so."""
        return True

    def storages(self, value: SpmdValue, every: Sequence[Placement]) -> tuple[Placement, ...]:
        """How a parameter may be kept, of every way to."""
        return tuple(every)

    def conversion(self, value: SpmdValue, source: Placement, target: Placement) -> bool:
        """Whether a value may be converted so."""
        return True


class DataParallel(Allowed):
    """Samples are dealt, parameters are whole, their gradients are summed by an all-reduce.

    An operator that cannot be divided along the samples runs on all devices, one that can does not:
    where all do everything, nothing is trained in parallel, even if that is the fastest.

    Args:
        graph: the model.
        theory: of the graph.
    """

    def __init__(self, graph: SpmdGraph, theory: Theory) -> None:
        self._samples = sample_shards(graph, theory)
        self._dealt = frozenset(
            operator.name
            for operator in graph.operators
            if any(self._deals(operator, rule) for rule in theory.rules(operator))
        )

    def rule(self, operator: SpmdOperator, rule: Rule) -> bool:
        """Along the samples where that is possible, else not divided."""
        if operator.name in self._dealt:
            return self._deals(operator, rule)
        return not any(placement.is_shard for placement in (*rule.inputs, *rule.outputs))

    def _deals(self, operator: SpmdOperator, rule: Rule) -> bool:
        """Whether a rule divides an operator along the samples, and nothing else."""
        if rule.option is Option.SUFFICIENT_FACTORS:
            return False
        placed = operator.operands(rule.inputs, rule.outputs)
        shards = [(name, placement) for name, placement in placed if placement.is_shard]
        return bool(shards) and all(
            placement in self._samples.get(name, ()) for name, placement in shards
        )

    def storages(self, value: SpmdValue, every: Sequence[Placement]) -> tuple[Placement, ...]:
        """Whole."""
        return tuple(every[:1])

    def conversion(self, value: SpmdValue, source: Placement, target: Placement) -> bool:
        """Parameters are only read as they are."""
        if value.source is ValueSource.PARAMETER:
            return not source.is_shard and not target.is_shard
        return True


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
        if value.source is ValueSource.PARAMETER:
            return target.kind in (PlacementKind.REPLICATE_SUMMED, PlacementKind.REPLICATE)
        return True


def sample_shards(graph: SpmdGraph, theory: Theory) -> Mapping[str, frozenset[Placement]]:
    """Of every value the shards that hold samples: what an input's first dimension becomes.

    The samples are followed through the rules from the inputs on: a rule deals one factor, so where
    one of its tensors is dealt by samples, all that it deals are.
    """
    found: dict[str, set[Placement]] = {}
    for value in graph.of_source(ValueSource.INPUT):
        first = [p for p in theory.shards(value.name) if p.dim == 0 and p.outer == 1]
        found[value.name] = set(first[:1])
    for operator in graph.operators:
        for rule in theory.rules(operator):
            placed = operator.operands(rule.inputs, rule.outputs)
            dealt = [(name, placement) for name, placement in placed if placement.is_shard]
            if any(placement in found.get(name, ()) for name, placement in dealt):
                for name, placement in dealt:
                    found.setdefault(name, set()).add(placement)
    return {name: frozenset(placements) for name, placements in found.items()}
