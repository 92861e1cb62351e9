"""One call of an operator as the table of rules reads it: shapes and arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        names = operator.inputs, operator.outputs
        inputs, outputs = (tuple(graph.value_of[name].shape for name in side) for side in names)
        return ShapedCall(operator, inputs, outputs)

    def get(self, argument: str, default: Any = None) -> Any:
        """An argument that is no tensor, or what the operator takes where it is not given."""
        return self.operator.attributes.get(argument, default)

    def index(self, *arguments: str) -> set[int]:
        """Which inputs are given as some arguments, as far as they are given."""
        given = self.operator.arguments
        return {given.index(argument) for argument in arguments if argument in given}

    @property
    def names(self) -> list[str]:
        """A factor per dimension of the first input."""
        return [f"x{dim}" for dim in range(len(self.inputs[0]))]

    def dim(self, argument: str = "dim", default: int | None = None, more: int = 0) -> int:
        """An argument that is a dimension of the first input (or of ``more``), from the front."""
        return int(self.get(argument, default)) % max(len(self.inputs[0]) + more, 1)

    def dims(self, argument: str = "dim") -> list[int]:
        """An argument that is dimensions; all of the first input where it is None or empty."""
        given, rank = self.get(argument), len(self.inputs[0])
        if given is None or given == ():
            return list(range(rank))
        several = given if isinstance(given, tuple) else (given,)
        return [int(dim) % max(rank, 1) for dim in several]

    def spec(self, text: str, **more: Any) -> FactorSpec:
        """Factors from a line of text, with further attributes of a :class:`FactorSpec`."""
        return replace(spec_of_text(text, self.inputs, self.outputs), **more)

    def by_argument(self, texts: Mapping[str, str], outputs: str, **more: Any) -> FactorSpec:
        """Factors from a text per argument, of those that are given.

        Raises:
            KeyError: a tensor is given as an argument that has no text.
        """
        left = ", ".join(texts[argument] for argument in self.operator.arguments)
        return self.spec(f"{left} -> {outputs}", **more)

    def moved(self, *outputs: Iterable[str], **more: Any) -> FactorSpec:
        """Factors of one input, whose dimensions are :attr:`names`; by default it is linear."""
        right = ", ".join(" ".join(output) for output in outputs)
        return self.spec(f"{' '.join(self.names)} -> {right}", **{"linear": [{0}], **more})

    def dimensionwise(self, whole: Iterable[int] = (), **more: Any) -> FactorSpec:
        """Factors of an operator whose tensors all have the dimensions of the first output.

        Args:
            whole: dimensions that cannot be dealt.
            more: further attributes.
        """
        left, right = (", ".join(["…"] * len(side)) for side in (self.inputs, self.outputs))
        rank = len(self.outputs[0])
        return self.spec(f"{left} -> {right}", whole={f"…{rank - dim}" for dim in whole}, **more)
