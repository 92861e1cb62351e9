"""The captured model as data: a DAG of operators with the values that flow between them.

A *value* is what an operator hands on under one name: usually one tensor, sometimes a tuple
of tensors or a plain number (a size). An *operator* is the smallest thing that a planner
places; it may stand for several calls (a module with the item look-ups on its result), so an
operator can export several values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial

from lightning_gpp.common.strict_json import JsonFormat
from lightning_gpp.graph.tensor_spec import TensorSpec


class Variation(Enum):
    """How a value depends on the samples of a micro-batch.

    Attributes:
        SAMPLES: it holds something of each, along the batch dimensions of its tensors.
        SAME: it depends on none of them (a position embedding, a number of features).
        COUNT: a number in proportion to how many there are (a batch size).
        WHOLE: otherwise (the edges of a graph); it can only be handed over as it is.
    """

    SAMPLES = "samples"
    SAME = "same"
    COUNT = "count"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Value:
    """A named result that other operators may read.

    Attributes:
        name: unique in the graph.
        tensors: the tensors in it, in pytree order; empty for plain Python data.
        variation: how it goes with the samples of a micro-batch.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    variation: Variation = Variation.SAMPLES

    @property
    def size_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(spec.size_bytes for spec in self.tensors)

    @property
    def is_differentiable(self) -> bool:
        """Whether any of its tensors can carry a gradient."""
        return any(spec.is_differentiable for spec in self.tensors)

    @property
    def is_cuttable(self) -> bool:
        """Whether stages that take different numbers of samples at a time can exchange it."""
        if self.variation is Variation.SAMPLES:
            return bool(self.tensors) and all(s.batch_dim is not None for s in self.tensors)
        return self.variation is not Variation.WHOLE


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One tensor argument of the pipelined forward.

    Attributes:
        value: its name and type.
        requires_grad: whether a gradient has to flow back to the caller.
        stays: whether calls are expected to pass the same value again (the graph of full-graph
            training, a table of positions). Stages keep it, so it is sent once.
    """

    value: Value
    requires_grad: bool = False
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model, by its canonical (first) qualified name."""

    name: str
    size_bytes: int
    requires_grad: bool = True

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise ValueError(
                f"the size of parameter {self.name!r} cannot be negative, got {self.size_bytes}"
            )


@dataclass(frozen=True, slots=True)
class OpNode:
    """One operator.

    Attributes:
        name: unique in the graph, a valid identifier (``encoder_0``).
        target: qualified module name (``encoder.0``) or function (``torch.cat``).
        scope: qualified name of the innermost module whose forward makes the call; the module
            itself for a module operator; ``""`` for the root.
        inputs: names of the values it reads, without repetition.
        outputs: the values that others may read.
        parameters: canonical names of the parameters it reads. A name in several operators is a
            shared parameter.
        state: qualified names of buffers that a training forward changes (running statistics).
    """

    name: str
    target: str
    scope: str
    inputs: tuple[str, ...]
    outputs: tuple[Value, ...]
    parameters: tuple[str, ...] = ()
    state: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelGraph:
    """A model as operators in topological order.

    Attributes:
        inputs: tensor arguments of the pipelined forward.
        operators: in topological order (an operator reads only inputs and earlier values).
        outputs: names of the values that the model returns.
        parameters: all parameters that an operator reads.

    Raises:
        ValueError: a name is used twice, or a value is read before it is produced.
    """

    inputs: tuple[GraphInput, ...]
    operators: tuple[OpNode, ...]
    outputs: tuple[str, ...]
    parameters: tuple[Parameter, ...] = ()

    def __post_init__(self) -> None:
        known: set[str] = set()
        for value in (graph_input.value for graph_input in self.inputs):
            _add_name(known, value.name)
        names: set[str] = set()
        parameters = {parameter.name for parameter in self.parameters}
        for operator in self.operators:
            _add_name(names, operator.name)
            for name in operator.inputs:
                if name not in known:
                    raise ValueError(
                        f"operator {operator.name!r} reads {name!r}, which neither an input nor an "
                        "earlier operator produces; list operators in topological order"
                    )
            for value in operator.outputs:
                _add_name(known, value.name)
            if unknown := set(operator.parameters) - parameters:
                raise ValueError(
                    f"operator {operator.name!r} reads parameters {sorted(unknown)} that are not "
                    "listed in the graph's parameters"
                )
        for name in self.outputs:
            if name not in known:
                raise ValueError(f"the graph returns {name!r}, which nothing produces")

    def __iter__(self) -> Iterator[OpNode]:
        return iter(self.operators)

    def __len__(self) -> int:
        return len(self.operators)

    @cached_property
    def microbatch_size(self) -> int:
        """Samples in the micro-batch that the sizes of its tensors are of; 1 where none says."""
        sizes = [
            spec.shape[spec.batch_dim]
            for graph_input in self.inputs
            for spec in graph_input.value.tensors
            if spec.batch_dim is not None
        ]
        return max(sizes, default=1)

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """Every value by name, inputs included."""
        values = {graph_input.value.name: graph_input.value for graph_input in self.inputs}
        values |= {value.name: value for operator in self.operators for value in operator.outputs}
        return values

    @cached_property
    def batch_dims(self) -> Mapping[str, tuple[int | None, ...]]:
        """Value name -> dimension of the samples for each of its tensors."""
        return {
            name: tuple(spec.batch_dim for spec in value.tensors)
            for name, value in self.values.items()
        }

    @cached_property
    def staying(self) -> frozenset[str]:
        """Inputs that stages keep."""
        return frozenset(item.value.name for item in self.inputs if item.stays)

    @cached_property
    def producer(self) -> Mapping[str, str]:
        """Value name -> name of the operator that produces it (inputs are absent)."""
        return {
            value.name: operator.name for operator in self.operators for value in operator.outputs
        }

    @cached_property
    def operator(self) -> Mapping[str, OpNode]:
        """Operator by name."""
        return {operator.name: operator for operator in self.operators}

    @cached_property
    def parameter(self) -> Mapping[str, Parameter]:
        """Parameter by canonical name."""
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def reads(self) -> tuple[tuple[str, str | None, str], ...]:
        """Every value that an operator reads: its name, who produces it (not of inputs), who reads.

        In the order of the readers.
        """
        return tuple(
            (name, self.producer.get(name), operator.name)
            for operator in self.operators
            for name in operator.inputs
        )

    @cached_property
    def readers(self) -> Mapping[str, tuple[str, ...]]:
        """Parameter -> operators that read it, both in the order of the operators."""
        found: dict[str, list[str]] = {}
        for operator in self.operators:
            for name in dict.fromkeys(operator.parameters):
                found.setdefault(name, []).append(operator.name)
        return {name: tuple(operators) for name, operators in found.items()}

    @cached_property
    def with_gradient(self) -> frozenset[str]:
        """Values whose gradient goes back to who produced them; of inputs, to the caller."""
        found = {item.value.name for item in self.inputs if item.requires_grad}
        return frozenset(found.union(n for n in self.producer if self.values[n].is_differentiable))

    @cached_property
    def predecessors(self) -> Mapping[str, tuple[str, ...]]:
        """Operator name -> operators whose values it reads, in topological order."""
        return {
            operator.name: tuple(
                dict.fromkeys(
                    self.producer[name] for name in operator.inputs if name in self.producer
                )
            )
            for operator in self.operators
        }

    @cached_property
    def successors(self) -> Mapping[str, tuple[str, ...]]:
        """Operator name -> operators that read its values, in topological order."""
        successors: dict[str, list[str]] = {operator.name: [] for operator in self.operators}
        for operator in self.operators:
            for predecessor in self.predecessors[operator.name]:
                successors[predecessor].append(operator.name)
        return {name: tuple(targets) for name, targets in successors.items()}


def _add_name(names: set[str], name: str) -> None:
    if not name:
        raise ValueError("an operator or value has an empty name; give it one")
    if name in names:
        raise ValueError(f"the name {name!r} is used twice; names must be unique")
    names.add(name)


FORMAT = JsonFormat("lightning_gpp.model_graph", version=3, older=(1,))
graph_to_json = FORMAT.dumps
graph_from_json = partial(FORMAT.loads, ModelGraph)
"""Reads what ``graph_to_json`` writes; ``source=`` says where it is from, for errors."""
