"""All rules of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator
from lightning_gpp.spmd.placement import PARTIAL, R_SAME, R_SUMMED, Placement, shard
from lightning_gpp.spmd.rules.axes import Axes
from lightning_gpp.spmd.rules.call import ShapedCall
from lightning_gpp.spmd.rules.factors import FactorSpec
from lightning_gpp.spmd.rules.rule import Rule, replicated_rules, rules_of_spec
from lightning_gpp.spmd.rules.table import SPECS


class Theory:
    """What may be done with every operator and tensor of a graph.

    Args:
        graph: the model.
        num_devices: that it is divided over: a dimension is only dealt where every device gets a
            unit of it, so no operator ever sees an empty tensor.
    """

    def __init__(self, graph: SpmdGraph, num_devices: int) -> None:
        self.graph, self.num_devices = graph, num_devices
        self.specs: dict[str, FactorSpec] = {}
        for operator in graph.operators:
            function = SPECS.get(operator.kind)
            if function and operator.outputs and (spec := function(ShapedCall.of(graph, operator))):
                self.specs[operator.name] = spec
        self._axes = Axes(graph, self.specs)
        self._rules: dict[str, tuple[Rule, ...]] = {}

    def rules(self, operator: SpmdOperator) -> tuple[Rule, ...]:
        """The rules of an operator; those of every operator where nothing is known of it."""
        if operator.name not in self._rules:
            tensors = (*operator.inputs, *operator.outputs)
            gradients = tuple(self.graph.value_of[name].requires_grad for name in tensors)
            if spec := self.specs.get(operator.name):
                found = rules_of_spec(spec, self._axes.cuts(operator, self.num_devices), gradients)
            else:
                sizes = len(operator.inputs), len(operator.outputs)
                found = tuple(replicated_rules(*sizes, gradients))
            self._rules[operator.name] = found
        return self._rules[operator.name]

    def shards(self, value: str) -> tuple[Placement, ...]:
        """The ways to shard a tensor."""
        cuts = self._axes.cuts_of(value, self.num_devices)
        return tuple(shard(dim, units, outer=outer) for dim, outer, units in cuts)

    def placements(self, value: str) -> tuple[Placement, ...]:
        """All ways to hold a tensor; without a gradient, ``R`` is ``R=``."""
        summed = (R_SUMMED,) if self.graph.value_of[value].requires_grad else ()
        return (R_SAME, *summed, *self.shards(value), PARTIAL)

    @cached_property
    def units(self) -> tuple[int, ...]:
        """All numbers of units that anything is dealt in."""
        placed = (placement for value in self.graph.values for placement in self.shards(value.name))
        return tuple(sorted({placement.units or 0 for placement in placed}))

    @property
    def unknown(self) -> Sequence[SpmdOperator]:
        """Operators of which nothing is known: they are replicated."""
        return [op for op in self.graph.operators if op.name not in self.specs]
