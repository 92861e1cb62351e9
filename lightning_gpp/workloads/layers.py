"""Builds models of layers, as a graph and as the work of every operator.

Operators have the granularity of GraphPipe's figure 10 (arXiv 2406.17145): a Transformer layer is
one attention and two linear operators; normalisation, activation function and residual belong to
the operator before them. Values are float32; sizes are of one sample.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.cost import Line, OpWork
from lightning_gpp.graph import GraphInput, ModelGraph, OpNode, Parameter, TensorSpec, Value
from lightning_gpp.workloads.workload import Workload

FLOAT_BYTES = 4
INDEX_BYTES = 8

LINEAR_KERNELS = 3
"""Product, bias with activation function, normalisation or residual."""

ATTENTION_KERNELS = 8
"""Projections of query, key and value, scores, softmax, product with the values, projection of the
result, residual with normalisation."""


class ModelBuilder:
    """Collects operators in topological order.

    Args:
        dtype: what matrix products are computed in, see
            :attr:`~lightning_gpp.cost.OpWork.dtype`.
        num_samples: that the sizes of values are of; work is always of one.

    >>> builder = ModelBuilder("float32")
    >>> hidden = builder.linear("layer", builder.argument("x", builder.result(16)), 16, 4)
    >>> builder.graph([hidden]).operator["layer"].parameters
    ('layer.weight',)
    """

    def __init__(self, dtype: str, num_samples: int = 1) -> None:
        self.dtype, self._num_samples = dtype, num_samples
        self.works: dict[str, OpWork] = {}
        self._inputs: list[GraphInput] = []
        self._operators: list[OpNode] = []
        self._parameters: list[Parameter] = []
        self._values: dict[str, Value] = {}

    def argument(self, name: str, spec: TensorSpec, *, stays: bool = False) -> str:
        """An argument of the model; gives the value's name, as all methods do."""
        self._values[name] = Value(name, (spec,))
        self._inputs.append(GraphInput(self._values[name], stays=stays))
        return name

    def linear(
        self, name: str, source: str, in_features: int, out_features: int, rows: int = 1
    ) -> str:
        """``rows x in_features`` to ``rows x out_features``; keeps its result."""
        weight_bytes = FLOAT_BYTES * (in_features + 1) * out_features
        out_bytes = FLOAT_BYTES * rows * out_features
        work = OpWork(
            flops=Line(per_sample=2.0 * rows * in_features * out_features),
            moved_bytes=Line(FLOAT_BYTES * rows * in_features + out_bytes, fixed=weight_bytes),
            activation_bytes=Line(out_bytes),
            num_kernels=LINEAR_KERNELS,
            dtype=self.dtype,
        )
        shape = (out_features,) if rows == 1 else (rows, out_features)
        return self.operator(name, [source], self.result(*shape), work, weight_bytes)

    def attention(self, name: str, source: str, length: int, hidden: int, num_heads: int) -> str:
        """Multi-head self-attention on ``length x hidden``.

        Keeps query, key, value, the heads' result and its own, and the scores of every head; all of
        them are written once and read once.
        """
        weight_bytes = FLOAT_BYTES * 4 * hidden * (hidden + 1)
        kept_bytes = FLOAT_BYTES * (5 * length * hidden + num_heads * length**2)
        work = OpWork(
            flops=Line(2.0 * length * 4 * hidden**2 + 2 * 2.0 * length**2 * hidden),
            moved_bytes=Line(2 * kept_bytes, fixed=weight_bytes),
            activation_bytes=Line(kept_bytes),
            num_kernels=ATTENTION_KERNELS,
            dtype=self.dtype,
        )
        return self.operator(name, [source], self.result(length, hidden), work, weight_bytes)

    def embedding(self, name: str, source: str, num_entries: int, bag: int, width: int) -> str:
        """Looks up the rows of a bag of indices, one behind the other: ``bag * width`` wide."""
        rows_bytes = FLOAT_BYTES * bag * width
        work = OpWork(
            moved_bytes=Line(INDEX_BYTES * bag + 2 * rows_bytes),
            activation_bytes=Line(INDEX_BYTES * bag),
            dtype=self.dtype,
        )
        table_bytes = FLOAT_BYTES * num_entries * width
        return self.operator(name, [source], self.result(bag * width), work, table_bytes)

    def concat(self, name: str, sources: Sequence[str]) -> str:
        """Joins values along their last dimension.

        Raises:
            ValueError: there are none.
        """
        if not sources:
            raise ValueError("a model needs at least one branch, got none")
        shapes = [self._values[source].tensors[0].shape for source in sources]
        spec = TensorSpec((*shapes[0][:-1], sum(shape[-1] for shape in shapes)), "float32", 0)
        work = OpWork(
            moved_bytes=Line(2 * spec.size_bytes),
            activation_bytes=Line(spec.size_bytes),
            dtype=self.dtype,
        )
        return self.operator(name, sources, spec, work)

    def graph(self, outputs: Sequence[str]) -> ModelGraph:
        """The model that returns these values."""
        return ModelGraph(
            inputs=tuple(self._inputs),
            operators=tuple(self._operators),
            outputs=tuple(outputs),
            parameters=tuple(self._parameters),
        )

    def workload(self, name: str, output: str, samples_per_device: int, source: str) -> Workload:
        """The model that returns a value, as a workload."""
        return Workload(name, self.graph([output]), self.works, samples_per_device, source)

    def result(self, *shape: int, dtype: str = "float32") -> TensorSpec:
        """Numbers of so many for every sample."""
        return TensorSpec((self._num_samples, *shape), dtype, 0)

    def operator(
        self,
        name: str,
        sources: Sequence[str],
        result: TensorSpec,
        work: OpWork,
        parameter_bytes: int = 0,
    ) -> str:
        """An operator with the work of one sample."""
        identifier = name.replace(".", "_")
        value = Value(f"{identifier}_out", (result,))
        weights = [Parameter(f"{name}.weight", parameter_bytes)] if parameter_bytes else []
        self._operators.append(
            OpNode(
                name=identifier,
                target=name,
                scope=name,
                inputs=tuple(sources),
                outputs=(value,),
                parameters=tuple(weight.name for weight in weights),
            )
        )
        self._parameters += weights
        self._values[value.name] = value
        self.works[identifier] = work
        return value.name
