"""A captured model as data in which the vertices of its graph are the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, fx

from lightning_gpp.capture import CapturedModel
from lightning_gpp.capture.values.samples import GraphInputs
from lightning_gpp.gnn.graph_values import GraphValues, NodeKind, Surroundings
from lightning_gpp.graph import ModelGraph, OpNode, Value, Variation


def num_vertices_of(tensors: Mapping[str, Tensor]) -> int:
    """Vertices of the graph among some arguments."""
    found = GraphInputs.find(tensors)
    assert found is not None  # the graph was looked at before
    return found.num_nodes


def by_vertices(
    captured: CapturedModel, nodes: GraphValues, sizes: Mapping[str, tuple[int, ...]]
) -> ModelGraph:
    """The model with vertices in the place of samples.

    Args:
        captured: the model.
        nodes: its calls.
        sizes: shapes of its arguments.
    """
    graph, around = captured.graph, nodes.around
    kinds = {node.name: kind for node, kind in nodes.kinds.items()}
    inputs = tuple(
        replace(
            item,
            value=_value(_resized(item.value, sizes[item.value.name]), NodeKind.ROWS, around),
        )
        for item in graph.inputs
    )
    whole = (NodeKind.WHOLE, NodeKind.SIZE)
    operators: list[OpNode] = []
    for operator in graph:
        returned = [value.name in graph.outputs for value in operator.outputs]
        found = {kinds[node.name] for node in captured.nodes(operator.name)}
        if found.issubset(whole) and not any(returned):
            continue
        outputs = tuple(
            _value(value, kinds[value.name], around)
            for value, is_returned in zip(operator.outputs, returned, strict=True)
            if kinds[value.name] not in whole or is_returned
        )
        needs = _needs(captured.nodes(operator.name), nodes.kinds)
        operators.append(replace(operator, inputs=needs, outputs=outputs))
    return ModelGraph(inputs, tuple(operators), graph.outputs, graph.parameters)


def _resized(value: Value, shape: tuple[int, ...]) -> Value:
    """An argument of another size."""
    return replace(value, tensors=tuple(replace(spec, shape=shape) for spec in value.tensors))


def _value(value: Value, kind: NodeKind, around: Surroundings) -> Value:
    """A value whose rows are samples, if it has a row per vertex."""
    counts = {around.chunks.num_vertices, around.num_example}
    has_rows = [spec.shape[:1] and spec.shape[0] in counts for spec in value.tensors]
    if kind is not NodeKind.ROWS or not has_rows or not all(has_rows):
        return replace(value, variation=Variation.WHOLE)
    tensors = tuple(
        replace(spec, shape=(around.chunks.num_vertices, *spec.shape[1:]), batch_dim=0)
        for spec in value.tensors
    )
    return Value(value.name, tensors, Variation.SAMPLES)


def _needs(nodes: Sequence[fx.Node], kinds: Mapping[fx.Node, NodeKind]) -> tuple[str, ...]:
    """Names of the values that an operator needs, as read: it computes whole ones by itself."""
    members, found, seen = set(nodes), dict[str, None](), set[fx.Node]()
    stack = [arg for node in reversed(nodes) for arg in reversed(node.all_input_nodes)]
    while stack:
        node = stack.pop()
        if node in members or node in seen or node.op == "get_attr":
            continue
        seen.add(node)
        if node.op == "placeholder" or kinds[node] not in (NodeKind.WHOLE, NodeKind.SIZE):
            found[node.name] = None
        elif kinds[node] is NodeKind.WHOLE:
            stack += reversed(node.all_input_nodes)
    return tuple(found)
