"""A rule: placements of an operator's inputs that give placements of its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

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


class FactorCut(NamedTuple):
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
    num_inputs, num_outputs = len(spec.inputs), len(spec.outputs)
    rules = [*replicated_rules(num_inputs, num_outputs, has_gradient)]
    whole = rules[-1].inputs
    for linear in spec.linear:
        if all(has_gradient[index] for index in linear):
            inputs = [PARTIAL if i in linear else place for i, place in enumerate(whole)]
            rules.append(Rule(tuple(inputs), (PARTIAL,) * num_outputs, note="of summands"))
    for cut in cuts:
        if cut.factor not in spec.whole:
            rules += _dealt(spec, cut, has_gradient, whole)
    return tuple(dict.fromkeys(rules))


def replicated_rules(
    num_inputs: int, num_outputs: int, has_gradient: tuple[bool, ...]
) -> Iterator[Rule]:
    """The rules of every operator: all devices do all of it, and sum gradients later if at all."""
    yield Rule((R_SAME,) * num_inputs, (R_SAME,) * num_outputs, note="replicated")
    if any(has_gradient[num_inputs:]):
        summed = tuple(R_SUMMED if gradient else R_SAME for gradient in has_gradient)
        note = "replicated, gradients summed later"
        yield Rule(summed[:num_inputs], summed[num_inputs:], note=note)


def _dealt(
    spec: FactorSpec, cut: FactorCut, has_gradient: tuple[bool, ...], whole: tuple[Placement, ...]
) -> Iterator[Rule]:
    """The rules of a factor that is dealt; inputs without it lie as ``whole`` says."""

    def place(tensor: Dims) -> Placement | None:
        found = spec.place(cut.factor, tensor)
        return found and shard(found[0], cut.units, outer=found[1] * cut.outer)

    dealt = [place(tensor) for tensor in spec.outputs]
    is_sum = None in dealt
    if is_sum and any(dealt):
        return
    outputs = tuple(placement or PARTIAL for placement in dealt)
    inputs = tuple(
        place(tensor) or (PARTIAL if is_sum and index in spec.added else whole[index])
        for index, tensor in enumerate(spec.inputs)
    )
    option = spec.options.get(cut.factor, Option.PLAIN)
    yield Rule(inputs, outputs, option, f"{'sum over' if is_sum else 'divided along'} {cut.factor}")
    if spec.weight is not None and cut.factor in spec.samples and has_gradient[spec.weight]:
        same = tuple(R_SAME if p == R_SUMMED else p for p in inputs)
        yield Rule(same, outputs, Option.SUFFICIENT_FACTORS, "samples, factors gathered")
