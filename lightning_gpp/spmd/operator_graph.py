"""A model as a graph of ATen operators, as ``torch.export`` gives it, without torch.

Finer than :class:`~lightning_gpp.graph.ModelGraph`, whose operators are what a planner puts on one
device: here one operator is divided over all devices, so what it does to every dimension counts.
All sizes are fixed: another batch size is another graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TypeVar

from lightning_gpp.graph.tensor_spec import TensorSpec

T = TypeVar("T")


class ValueSource(Enum):
    """Where a value comes from."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class SpmdValue:
    """One tensor.

    Attributes:
        name: unique in the graph; of a parameter or buffer its canonical qualified name.
        spec: shape and dtype of the whole tensor.
        source: an argument of the forward (rank 0 has it), a parameter, a buffer (a constant tensor
            as well), or an operator's result.
        requires_grad: whether a gradient for it has to be computed.
    """

    name: str
    spec: TensorSpec
    source: ValueSource
    requires_grad: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the whole tensor."""
        return self.spec.shape

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.spec.size_bytes


@dataclass(frozen=True, slots=True)
class SpmdOperator:
    """One call of an ATen operator.

    Attributes:
        name: unique in the graph; the name of the node in the exported program.
        kind: the operator without namespace and overload (``"linear"``, ``"add"``); what the rules
            go by.
        inputs: names of the tensors it reads, one per tensor argument; a tensor may come twice.
        arguments: what each of ``inputs`` is: the argument's name in the operator's schema
            (``"weight"``), with an index where the argument is a list (``"tensors[1]"``).
        outputs: names of the tensors it makes.
        attributes: its other arguments by name, where given: numbers, texts, truth values, None,
            and tuples of these; what only torch knows (dtypes) is a text.
        flops: floating-point operations of the forward on the whole tensors.
        module: qualified name of the innermost module that calls it; ``""`` for the root.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, object] = field(default_factory=dict, hash=False)
    flops: float = 0.0
    module: str = ""

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.arguments):
            raise ValueError(
                f"operator {self.name!r}: {len(self.inputs)} inputs, but {len(self.arguments)} "
                "names of arguments; give one for each"
            )

    def operands(self, inputs: Sequence[T], outputs: Sequence[T]) -> tuple[tuple[str, T], ...]:
        """Its tensors by name, each with what is given for it."""
        return (*zip(self.inputs, inputs), *zip(self.outputs, outputs))


@dataclass(frozen=True)
class SpmdGraph:
    """The whole forward, in an order in which it can run.

    Attributes:
        values: all tensors.
        operators: in topological order.
        outputs: names of the tensors that the forward returns.

    Raises:
        ValueError: a name is used twice or unknown, or an operator reads what comes later.
    """

    values: tuple[SpmdValue, ...]
    operators: tuple[SpmdOperator, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.value_of) != len(self.values):
            raise ValueError("two values of the graph have the same name")
        ready = {v.name for v in self.values if v.source is not ValueSource.OPERATOR}
        for operator in self.operators:
            if late := [name for name in operator.inputs if name not in ready]:
                raise ValueError(f"operator {operator.name!r} reads {late[0]!r} before it is there")
            for name in operator.outputs:
                if name in ready or name not in self.value_of:
                    raise ValueError(
                        f"operator {operator.name!r} makes {name!r}, which is made before, or is "
                        "not among the values"
                    )
            ready |= set(operator.outputs)
        if unknown := [name for name in self.outputs if name not in ready]:
            raise ValueError(f"the graph returns {unknown[0]!r}, which nothing makes")

    @cached_property
    def value_of(self) -> dict[str, SpmdValue]:
        """Values by name."""
        return {value.name: value for value in self.values}

    @cached_property
    def operator_of(self) -> dict[str, SpmdOperator]:
        """Operators by name."""
        return {operator.name: operator for operator in self.operators}

    def of_source(self, source: ValueSource) -> tuple[SpmdValue, ...]:
        """The values from a source."""
        return tuple(value for value in self.values if value.source is source)
