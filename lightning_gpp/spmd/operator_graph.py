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

    @property
    def is_given(self) -> bool:
        """Whether it is there without an operator."""
        return self.source is not ValueSource.OPERATOR


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
        attributes: its arguments by name, where given, in the order of the schema; what runs it
            knows what stands for tensors in them.
        flops: floating-point operations of the forward on the whole tensors.
        target: the overload that runs, as ``torch.ops`` has it (``"aten.view.default"``).
        is_recorded: whether autograd may record it; not in ``torch.no_grad()``.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, object] = field(default_factory=dict, hash=False)
    flops: float = 0.0
    target: str = ""
    is_recorded: bool = True

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
    """

    values: tuple[SpmdValue, ...]
    operators: tuple[SpmdOperator, ...]
    outputs: tuple[str, ...]

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
