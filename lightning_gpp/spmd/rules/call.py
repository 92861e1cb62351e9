"""One call of an operator as the tables of rules read it: shapes and arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator
from lightning_gpp.spmd.rules.factors import FactorSpec, spec_of_text


@dataclass(frozen=True, slots=True)
class ShapedCall:
    """An operator with the shapes of its tensors.

    Attributes:
        operator: the operator.
        inputs: shapes of its inputs.
        outputs: shapes of its outputs.
    """

    operator: SpmdOperator
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(graph: SpmdGraph, operator: SpmdOperator) -> ShapedCall:
        """The call of an operator of a graph."""

        def shapes(names: Iterable[str]) -> tuple[tuple[int, ...], ...]:
            return tuple(graph.value_of[name].shape for name in names)

        return ShapedCall(operator, shapes(operator.inputs), shapes(operator.outputs))

    def attribute(self, name: str, default: Any = None) -> Any:
        """An argument that is no tensor, or what the operator takes where it is not given."""
        return self.operator.attributes.get(name, default)

    def index(self, argument: str) -> int | None:
        """Which input is given as an argument, if one is."""
        arguments = self.operator.arguments
        return arguments.index(argument) if argument in arguments else None

    def dim(self, name: str = "dim", default: int | None = None, rank: int | None = None) -> int:
        """An argument that is a dimension, counted from the front.

        Args:
            name: of the argument.
            default: where it is not given.
            rank: number of dimensions that it counts; those of the first input if not given.
        """
        rank = len(self.inputs[0]) if rank is None else rank
        return int(self.attribute(name, default)) % max(rank, 1)

    def dims(self, name: str = "dim") -> tuple[int, ...]:
        """An argument that is dimensions; all of the first input where it is None or empty."""
        given, rank = self.attribute(name), len(self.inputs[0])
        if given is None or given == ():
            return tuple(range(rank))
        several: Sequence[int] = given if isinstance(given, (tuple, list)) else (given,)
        return tuple(int(dim) % max(rank, 1) for dim in several)

    def spec(self, text: str, **given: int) -> FactorSpec:
        """Factors from a line of text; one for every input and output, in their order."""
        return spec_of_text(text, self.inputs, self.outputs, **given)

    def by_argument(self, outputs: str, /, **texts: str) -> FactorSpec:
        """Factors from a text per argument, of those that are given.

        Raises:
            KeyError: a tensor is given as an argument that has no text.
        """
        return self.spec(f"{', '.join(texts[a] for a in self.operator.arguments)} -> {outputs}")

    def dimensionwise(self, whole: Iterable[int] = ()) -> FactorSpec:
        """Factors of an operator whose tensors all have the dimensions of the first output.

        Args:
            whole: dimensions that cannot be dealt.
        """
        left = ", ".join(["…"] * len(self.inputs))
        right = ", ".join(["…"] * len(self.outputs))
        spec = self.spec(f"{left} -> {right}")
        rank = len(self.outputs[0])
        return replace(spec, whole=frozenset(f"…{rank - dim}" for dim in whole))
