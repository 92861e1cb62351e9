"""All rules of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator
from lightning_gpp.spmd.placement import PARTIAL, R_SAME, R_SUMMED, Placement, shard
from lightning_gpp.spmd.program import Option
from lightning_gpp.spmd.rules.factors import Axes, Dims, FactorCut, FactorSpec, ShapedCall
from lightning_gpp.spmd.rules.table import SPECS


@dataclass(frozen=True, slots=True)
class Rule:
    """One valid way to run an operator on all devices.

    Attributes:
        inputs: placement of every input.
        outputs: placement of every output.
        option: what a device does beyond the plain call.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    option: Option = Option.PLAIN

    def __str__(self) -> str:
        left, right = (", ".join(map(str, side)) for side in (self.inputs, self.outputs))
        option = "" if self.option is Option.PLAIN else f" [{self.option.value}]"
        return f"{left} -> {right}{option}"


def rules_of_spec(
    spec: FactorSpec, cuts: Iterable[FactorCut], has_gradient: tuple[bool, ...]
) -> tuple[Rule, ...]:
    """All rules that a spec gives.

    Args:
        spec: the operator's factors.
        cuts: in which ways its factors may be divided.
        has_gradient: of every input, then of every output, whether a gradient flows.

    Summands of what has no gradient come only from sums, and go no further: numbers that are
    counted or compared are not added up.

    >>> from lightning_gpp.spmd.rules.factors import FactorCut, spec_of_text
    >>> spec = spec_of_text("n i, o i -> n o", ((8, 3), (4, 3)), ((8, 4),))
    >>> cuts = [FactorCut(factor, 1, spec.sizes[factor]) for factor in "nio"]
    >>> for rule in rules_of_spec(spec, cuts, (True, True, True)):
    ...     print(rule)
    R=, R= -> R=
    R, R -> R
    S0/8, R -> S0/8
    S1/3, S1/3 -> P
    R, S0/4 -> S1/4
    """
    num_inputs, num_outputs = len(spec.inputs), len(spec.outputs)
    rules = [*replicated_rules(num_inputs, num_outputs, has_gradient)]
    whole = rules[-1].inputs
    for linear in spec.linear:
        if all(has_gradient[index] for index in linear):
            inputs = [PARTIAL if i in linear else place for i, place in enumerate(whole)]
            rules.append(Rule(tuple(inputs), (PARTIAL,) * num_outputs))
    for cut in cuts:
        if cut.factor not in spec.whole:
            rules += _divided(spec, cut, has_gradient, whole)
    return tuple(dict.fromkeys(rules))


def replicated_rules(
    num_inputs: int, num_outputs: int, has_gradient: tuple[bool, ...]
) -> Iterator[Rule]:
    """The rules of every operator: all devices do all of it, and sum gradients later if at all."""
    yield Rule((R_SAME,) * num_inputs, (R_SAME,) * num_outputs)
    if any(has_gradient[num_inputs:]):
        summed = tuple(R_SUMMED if gradient else R_SAME for gradient in has_gradient)
        yield Rule(summed[:num_inputs], summed[num_inputs:])


def _divided(
    spec: FactorSpec, cut: FactorCut, has_gradient: tuple[bool, ...], whole: tuple[Placement, ...]
) -> Iterator[Rule]:
    """The rules of a factor that is divided; inputs without it lie as ``whole`` says."""

    def place(tensor: Dims) -> Placement | None:
        found = spec.place(cut.factor, tensor)
        return found and shard(found[0], cut.units, outer=found[1] * cut.outer)

    divided = [place(tensor) for tensor in spec.outputs]
    is_sum = None in divided
    if is_sum and any(divided):
        return
    outputs = tuple(placement or PARTIAL for placement in divided)
    inputs = tuple(
        place(tensor) or (PARTIAL if is_sum and index in spec.added else whole[index])
        for index, tensor in enumerate(spec.inputs)
    )
    option = spec.options.get(cut.factor, Option.PLAIN)
    if option is Option.VOCABULARY and cut.outer > 1:
        return  # a device has to have rows that follow one another
    yield Rule(inputs, outputs, option)


class Theory:
    """All valid ways to divide the operators and tensors of a graph.

    Args:
        graph: the model.
        num_devices: that it is divided over: a dimension is only divided where every device gets a
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
        """All numbers of units that anything is divided in."""
        placed = (placement for value in self.graph.values for placement in self.shards(value.name))
        return tuple(sorted({placement.units or 0 for placement in placed}))
