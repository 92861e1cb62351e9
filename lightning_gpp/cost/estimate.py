"""Estimated costs, for devices on which nothing was measured.

What operators do is read from the model graph (bytes of values and parameters) and from a measured
profile where there is one (floating-point operations, activations); without one the operations are
judged by the parameters: a matrix meets every row of the output once. Seconds come from the
roofline model on the device kind's data sheet.

A graph knows no types of operators, so that judgement is coarse: it misses products of activations
(attention scores) and takes parameters that only multiply element by element for matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from lightning_gpp.cluster import Cluster, DeviceKind
from lightning_gpp.cost.costs import ESTIMATED, Costs
from lightning_gpp.cost.roofline import powers_of_two, roofline_costs
from lightning_gpp.cost.work import DEFAULT_DTYPE, Line, OpWork
from lightning_gpp.graph import ModelGraph, OpNode, TensorSpec, Value

NOMINAL_KIND = DeviceKind(
    name=ESTIMATED,
    peak_flops_per_s=dict.fromkeys(("float64", "float32", "float16", "bfloat16"), 1000000000000.0),
    peak_memory_bytes_per_s=20e9,
    source="nominal: a CPU socket",
)
"""The device of estimates for no device in particular: ratios between operators are what counts."""

IMAGE_DIMS = 4
"""Tensors of so many dimensions or more are taken for (samples, channels, height, width, ...)."""


def estimate_costs(graph: ModelGraph, cluster: Cluster, minibatch_size: int) -> Costs:
    """Costs on every kind of device of a cluster, at every power of two up to the mini-batch.

    Args:
        graph: the model.
        cluster: whose devices.
        minibatch_size: samples of a mini-batch.

    Raises:
        ValueError: nothing is known of a kind (of the only one: a nominal device stands for it),
            or not its speed in the type of some operator's output.
    """
    is_nominal = len(cluster.kinds) == 1 and not cluster.knows(cluster.kinds[0])
    kinds = [NOMINAL_KIND] if is_nominal else map(cluster.device_kind, cluster.kinds)
    return roofline_costs(graph_work(graph), kinds, powers_of_two(minibatch_size))


def with_estimates(costs: Costs, graph: ModelGraph, cluster: Cluster, minibatch_size: int) -> Costs:
    """Costs, with estimates for those kinds of a cluster's devices that they do not know.

    Args:
        costs: measured, or read from a file.
        graph: the model.
        cluster: whose devices.
        minibatch_size: samples of a mini-batch.

    Raises:
        ValueError: nothing is known of such a kind.
    """
    missing = [name for name in cluster.kinds if not costs.knows(name)]
    if not missing:
        return costs
    kinds = map(cluster.device_kind, missing)
    estimates = roofline_costs(graph_work(graph, costs), kinds, powers_of_two(minibatch_size))
    return Costs((*costs.profiles, *estimates.profiles))


def graph_work(graph: ModelGraph, measured: Costs | None = None) -> dict[str, OpWork]:
    """Operator name -> its work; flops and activations are those of measured costs, if given."""
    return {operator.name: _work(graph, operator, measured) for operator in graph}


def _work(graph: ModelGraph, operator: OpNode, measured: Costs | None) -> OpWork:
    read = [graph.values[name] for name in operator.inputs]
    written = values_line(operator.outputs)
    parameters = Line(fixed=sum(graph.parameter[name].size_bytes for name in operator.parameters))
    is_lookup = _is_lookup(read, operator)
    flops = Line() if is_lookup else _guessed_flops(graph, operator)
    activations = written
    if measured is not None:
        flops = measured.line(operator.name, "forward_flops")
        activations = measured.line(operator.name, "activation_bytes")
    return OpWork(
        flops=flops,
        # Of a table only the rows that are looked up are read: as much as is written.
        moved_bytes=values_line(read) + written + (written if is_lookup else parameters),
        activation_bytes=activations,
        dtype=_dtype(operator),
    )


def values_line(values: Iterable[Value]) -> Line:
    """Bytes of values: what has a dimension of samples grows with them."""
    specs = (spec for value in values for spec in value.tensors)
    return sum((_growing(spec, spec.size_bytes) for spec in specs), Line())


def _growing(spec: TensorSpec, amount: float) -> Line:
    """What there is of something, which grows as a tensor does."""
    if spec.batch_dim is None or not spec.shape[spec.batch_dim]:
        return Line(fixed=amount)
    return Line(per_sample=amount / spec.shape[spec.batch_dim])


def _is_lookup(read: Iterable[Value], operator: OpNode) -> bool:
    """Whether parameters are a table: they meet indices only."""
    tensors = [spec for value in read for spec in value.tensors]
    is_index = not any(spec.is_differentiable for spec in tensors)
    return is_index and bool(operator.parameters) and bool(tensors)


def _guessed_flops(graph: ModelGraph, operator: OpNode) -> Line:
    """Two operations per parameter and row of the output."""
    outputs = [spec for value in operator.outputs for spec in value.tensors if spec.shape]
    if not operator.parameters or not outputs:
        return Line()
    output = outputs[0]
    num_parameters = sum(
        graph.parameter[name].size_bytes // output.item_bytes for name in operator.parameters
    )
    return _growing(output, 2.0 * num_parameters * _rows(output))


def _rows(spec: TensorSpec) -> int:
    """Positions of an output; each holds one vector of features."""
    features = 1 if len(spec.shape) >= IMAGE_DIMS else len(spec.shape) - 1
    return math.prod(size for dim, size in enumerate(spec.shape) if dim != features)


def _dtype(operator: OpNode) -> str:
    for value in operator.outputs:
        for spec in value.tensors:
            if spec.is_differentiable:
                return spec.dtype
    return DEFAULT_DTYPE
