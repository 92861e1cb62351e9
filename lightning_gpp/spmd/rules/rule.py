"""A rule: placements of an operator's inputs that give placements of its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_gpp.spmd.placement import PARTIAL, R_SAME, R_SUMMED, Placement, shard
from lightning_gpp.spmd.program import Option
from lightning_gpp.spmd.rules.factors import Dims, FactorSpec


@dataclass(frozen=True, slots=True)
class Rule:
    """One sound way to run an operator on all devices.

    Attributes:
        inputs: placement of every input.
        outputs: placement of every output.
        option: what a device does beyond the plain call.
        note: what it is, for people.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    option: Option = Option.PLAIN
    note: str = ""

    def __str__(self) -> str:
        left, right = (", ".join(map(str, side)) for side in (self.inputs, self.outputs))
        option = "" if self.option is Option.PLAIN else f" [{self.option.value}]"
        return f"{left} -> {right}{option}"


@dataclass(frozen=True, slots=True)
class FactorCut:
    """A factor dealt in units: the factor seen as ``(outer, units, block)``."""

    factor: str
    outer: int
    units: int


def rules_of_spec(
    spec: FactorSpec, cuts: Iterable[FactorCut], has_gradient: tuple[bool, ...]
) -> tuple[Rule, ...]:
    """All rules that a spec gives.

    Args:
        spec: the operator's factors.
        cuts: in which ways its factors may be dealt.
        has_gradient: of every input, then of every output, whether a gradient flows.

    Summands of what has no gradient come only from sums, and go no further: numbers that are
    counted or compared are not added up.

    >>> from lightning_gpp.spmd.rules.factors import spec_of_text
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
    rules = [*replicated_rules(len(spec.inputs), len(spec.outputs), has_gradient)]
    flows = any(has_gradient[len(spec.inputs) :])
    for linear in spec.linear:
        if not all(has_gradient[index] for index in linear):
            continue
        rules.append(_linear_rule(spec, linear, has_gradient, flows))
    for cut in cuts:
        if cut.factor not in spec.whole:
            rules += _dealt(spec, cut, has_gradient, flows)
    return tuple(dict.fromkeys(rules))


def replicated_rules(
    num_inputs: int, num_outputs: int, has_gradient: tuple[bool, ...]
) -> Iterator[Rule]:
    """The rules of every operator: all devices do all of it."""
    yield Rule((R_SAME,) * num_inputs, (R_SAME,) * num_outputs, note="replicated")
    if any(has_gradient[num_inputs:]):
        summed = [R_SUMMED if gradient else R_SAME for gradient in has_gradient]
        yield Rule(
            tuple(summed[:num_inputs]),
            tuple(summed[num_inputs:]),
            note="replicated, gradients summed later",
        )


def _linear_rule(
    spec: FactorSpec, linear: frozenset[int], has_gradient: tuple[bool, ...], flows: bool
) -> Rule:
    inputs = [
        PARTIAL if index in linear else _replicated(has_gradient[index] and flows)
        for index in range(len(spec.inputs))
    ]
    return Rule(tuple(inputs), (PARTIAL,) * len(spec.outputs), note="of summands")


def _replicated(gradient: bool) -> Placement:
    return R_SUMMED if gradient else R_SAME


def _dealt(
    spec: FactorSpec, cut: FactorCut, has_gradient: tuple[bool, ...], flows: bool
) -> Iterator[Rule]:
    def place(tensor: Dims) -> Placement | None:
        if cut.factor not in (places := spec.places(tensor)):
            return None
        dim, outer = places[cut.factor]
        return shard(dim, cut.units, outer=outer * cut.outer)

    outputs = tuple(place(tensor) or PARTIAL for tensor in spec.outputs)
    is_sum = any(output == PARTIAL for output in outputs)
    if is_sum and any(output != PARTIAL for output in outputs):
        return
    inputs = []
    for index, tensor in enumerate(spec.inputs):
        own = place(tensor)
        if own is None:
            summed = is_sum and index in spec.added
            own = PARTIAL if summed else _replicated(has_gradient[index] and flows)
        inputs.append(own)
    option = spec.options.get(cut.factor, Option.PLAIN)
    yield Rule(tuple(inputs), outputs, option, _note(spec, cut.factor, is_sum))
    weight = spec.weight
    if weight is not None and cut.factor in spec.samples and has_gradient[weight]:
        same = tuple(R_SAME if p == R_SUMMED else p for p in inputs)
        yield Rule(same, outputs, Option.SUFFICIENT_FACTORS, "samples, factors gathered")


def _note(spec: FactorSpec, factor: str, is_sum: bool) -> str:
    if is_sum:
        return f"sum over {factor}"
    return f"divided along {factor}"
