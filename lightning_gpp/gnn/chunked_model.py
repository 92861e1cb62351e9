"""A captured model as stages that run on chunks of the vertices of one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from lightning_gpp.capture import CapturedModel
from lightning_gpp.capture.checks.rollback import rollback, training_flags
from lightning_gpp.gnn.chunk_graph import ChunkGraph, Surroundings, Way
from lightning_gpp.gnn.chunks import Chunks, EdgeSets, Rows
from lightning_gpp.gnn.errors import GraphTrainingError
from lightning_gpp.gnn.history import Techniques
from lightning_gpp.gnn.message_passing import is_layer
from lightning_gpp.graph import GraphInput, ModelGraph, OpNode, Value, Variation


@dataclass(frozen=True, slots=True)
class ChunkStage:
    """Some operators, which run on one chunk at a time.

    Attributes:
        model: whose.
        inputs: names of the values that it is called with.
        outputs: names of the values that it returns.
        nodes: what runs for every chunk.
    """

    model: ChunkedModel
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: list[fx.Node]

    def __call__(self, values: Sequence[Any], chunk: int | None) -> tuple[Any, ...]:
        """The values that leave it, of one chunk; of all vertices if ``chunk`` is None.

        Args:
            values: that enter it; those that are the same for all chunks whole, others of the rows
                of the chunk.
            chunk: its number.
        """
        graph, rows = self.model.nodes, self.model.rows(chunk)
        given = {self.model.node[name]: v for name, v in zip(self.inputs, values, strict=True)}
        whole = {str(n.target): v for n, v in given.items() if graph.ways[n] is Way.WHOLE}
        graph.update(whole)
        own = {node: value for node, value in given.items() if graph.ways[node] is not Way.WHOLE}
        found = graph.run(self.nodes, own, rows)
        return tuple(graph.value(self.model.node[name], found, rows) for name in self.outputs)


class ChunkedModel:
    """A model whose stages run on chunks of the vertices of one graph.

    Args:
        captured: the model, captured with the whole graph.
        tensors: arguments of its forward by name.
        chunks: of the vertices.
        techniques: how histories are used.
        flags: training flags of the sub-modules in training mode.

    Attributes:
        graph: the model as data, in which vertices are the samples: what depends on the graph alone
            is no operator, but computed by every stage that reads it.

    Raises:
        GraphTrainingError: the model cannot run in chunks.
    """

    def __init__(
        self,
        captured: CapturedModel,
        tensors: Mapping[str, Tensor],
        chunks: Chunks,
        techniques: Techniques,
        flags: Mapping[str, bool],
    ) -> None:
        self.captured, self.chunks = captured, chunks
        self._flags = dict(flags)
        self.around = Surroundings(chunks.num_vertices, EdgeSets(chunks), techniques)
        nodes = captured.all_nodes
        staying = {name: tensor for name, tensor in tensors.items() if _stays(captured, name)}
        with self._in_training():
            self.nodes = ChunkGraph("", captured.module, nodes, staying, self.around)
        self.node = {node.name: node for node in nodes}
        self._rows: dict[int | None, Rows] = {}
        if not any(is_layer(node, captured.module) for node in nodes):
            raise GraphTrainingError(
                f"{type(captured.module).__name__} has no message-passing layer of "
                "torch_geometric, which full-graph training in chunks is for; use "
                'strategy="graphpipe"'
            )
        self.graph = _by_vertices(captured, self.nodes, chunks.num_vertices)

    def _in_training(self) -> Any:
        return training_flags(self.captured.module, self._flags)

    def rows(self, chunk: int | None) -> Rows:
        """The vertices of a chunk; all of them for None."""
        if chunk not in self._rows:
            everything = torch.arange(self.chunks.num_vertices)
            vertices = everything if chunk is None else self.chunks.vertices[chunk]
            self._rows[chunk] = Rows(chunk, vertices)
        return self._rows[chunk]

    def begin_epoch(self) -> None:
        """A training pass over all chunks begins."""
        self.around.begin_epoch()

    def stage(
        self, operators: Sequence[str], inputs: Sequence[str], outputs: Sequence[str]
    ) -> ChunkStage:
        """A stage that runs on chunks.

        Args:
            operators: of :attr:`graph`.
            inputs: names of the values it will be called with.
            outputs: names of the values to return.
        """
        members = {node.name for name in operators for node in self.captured.nodes(name)}
        nodes = self.nodes.needed(node for node in self.nodes.nodes if node.name in members)
        with rollback(self.captured.module), self._in_training():
            self.nodes.open_layers(nodes)
        return ChunkStage(self, tuple(inputs), tuple(outputs), nodes)


def _stays(captured: CapturedModel, name: str) -> bool:
    return name in captured.graph.staying


def _by_vertices(captured: CapturedModel, nodes: ChunkGraph, num_vertices: int) -> ModelGraph:
    """The model with vertices in the place of samples."""
    graph, ways = captured.graph, {node.name: way for node, way in nodes.ways.items()}
    needs = _Needs(captured, nodes)
    inputs = tuple(
        GraphInput(_value(item.value, num_vertices), item.requires_grad, item.stays)
        for item in graph.inputs
    )
    operators: list[OpNode] = []
    for operator in graph:
        found = {ways[node.name] for node in captured.nodes(operator.name)}
        if found <= {Way.WHOLE, Way.SIZE} and not _returned(operator, graph):
            continue
        outputs = tuple(
            _value(value, num_vertices)
            for value in operator.outputs
            if ways[value.name] not in (Way.WHOLE, Way.SIZE) or value.name in graph.outputs
        )
        operators.append(replace(operator, inputs=needs.of(operator.name), outputs=outputs))
    return ModelGraph(inputs, tuple(operators), graph.outputs, graph.parameters)


def _returned(operator: OpNode, graph: ModelGraph) -> bool:
    return any(value.name in graph.outputs for value in operator.outputs)


def _value(value: Value, num_vertices: int) -> Value:
    if value.variation is not Variation.VERTICES:
        return value
    tensors = tuple(
        replace(spec, batch_dim=spec.vertex_dim, vertex_dim=None) for spec in value.tensors
    )
    return Value(value.name, tensors, Variation.SAMPLES)


class _Needs:
    """Which values an operator needs, where it computes whole values by itself."""

    def __init__(self, captured: CapturedModel, nodes: ChunkGraph) -> None:
        self._captured, self._ways = captured, nodes.ways

    def of(self, operator: str) -> tuple[str, ...]:
        """Names of values, in the order in which they are read."""
        nodes = self._captured.nodes(operator)
        members, found, seen = set(nodes), dict[str, None](), set[fx.Node]()
        stack = [arg for node in reversed(nodes) for arg in reversed(node.all_input_nodes)]
        while stack:
            node = stack.pop()
            if node in members or node in seen or node.op == "get_attr":
                continue
            seen.add(node)
            way = self._ways[node]
            if node.op == "placeholder" or way not in (Way.WHOLE, Way.SIZE):
                found[node.name] = None
            elif way is Way.WHOLE:
                stack += reversed(node.all_input_nodes)
        return tuple(found)
