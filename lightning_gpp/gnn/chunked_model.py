"""A captured model as stages that run on chunks of the vertices of one graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from lightning_gpp.capture import CapturedModel
from lightning_gpp.capture.checks.rollback import rollback, training_flags
from lightning_gpp.gnn.chunk_graph import ChunkGraph, NodeKind, Surroundings
from lightning_gpp.gnn.chunks import ChunkRows, Chunks, EdgeSets
from lightning_gpp.gnn.errors import GraphTrainingError
from lightning_gpp.gnn.history import Techniques
from lightning_gpp.gnn.message_passing import is_layer
from lightning_gpp.graph import ModelGraph, OpNode, Value, Variation


@dataclass(frozen=True, slots=True)
class ChunkStage:
    """Some operators, which run on one chunk at a time.

    Attributes:
        model: whose.
        inputs: names of the values that it is called with.
        outputs: names of the values that it returns.
        members: names of the calls that belong to it.
        parameter_names: canonical names of the parameters it reads.
        buffer_names: canonical names of the buffers it reads.
    """

    model: ChunkedModel
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    members: frozenset[str]
    parameter_names: tuple[str, ...]
    buffer_names: tuple[str, ...]

    def __call__(self, values: Sequence[Any], chunk: int | None, *, training: bool) -> list[Any]:
        """The values that leave it, of one chunk; of all vertices if ``chunk`` is None.

        Args:
            values: that enter it; those that are the same for all chunks whole, others of the rows
                of the chunk.
            chunk: its number.
            training: mode of the modules.
        """
        return self.model.run(self, values, chunk, training=training)


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
        self.around = Surroundings(chunks.num_vertices, EdgeSets(chunks), techniques)
        self._flags = dict(flags)
        self._rows: dict[int | None, ChunkRows] = {}
        self._staying = {n: tensors[n] for n in tensors if n in captured.graph.staying}
        self._graphs: dict[bool, ChunkGraph] = {}
        nodes = captured.all_nodes(training=True)
        if not any(is_layer(node, captured.module) for node in nodes):
            raise GraphTrainingError(
                f"{type(captured.module).__name__} has no message-passing layer of "
                "torch_geometric, which full-graph training in chunks is for; use "
                'strategy="graphpipe"'
            )
        self.graph = _by_vertices(captured, self._nodes(training=True))

    def _nodes(self, *, training: bool) -> ChunkGraph:
        if training not in self._graphs:
            nodes = self.captured.all_nodes(training=training)
            self._graphs[training] = ChunkGraph(
                "", self.captured.module, nodes, self._staying, self.around
            )
        return self._graphs[training]

    def in_training(self) -> AbstractContextManager[None]:
        """Sub-modules are in the modes of training."""
        return training_flags(self.captured.module, self._flags)

    def rows(self, chunk: int | None) -> ChunkRows:
        """The vertices of a chunk; all of them for None."""
        if chunk not in self._rows:
            everything = torch.arange(self.chunks.num_vertices)
            vertices = everything if chunk is None else self.chunks.vertices[chunk]
            self._rows[chunk] = ChunkRows(chunk, vertices)
        return self._rows[chunk]

    @contextmanager
    def filling(self) -> Iterator[None]:
        """A pass over all vertices writes what layers read into the histories."""
        self.around.fills = True
        try:
            yield
        finally:
            self.around.fills = False

    def forget(self) -> None:
        """Histories and epochs begin anew."""
        self.around.histories.clear()
        self.around.epoch = -1

    def begin_epoch(self) -> None:
        """A training pass over all chunks begins."""
        self.around.begin_epoch()

    def stage(
        self,
        operators: Sequence[str],
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        runs: bool = True,
    ) -> ChunkStage:
        """A stage that runs on chunks.

        Args:
            operators: of :attr:`graph`.
            inputs: names of the values it will be called with.
            outputs: names of the values to return.
            runs: whether it will be called; otherwise only what it reads is known.

        Raises:
            GraphTrainingError: a layer cannot run on chunks.
        """
        nodes = [node for name in operators for node in self.captured.nodes(name)]
        read = [arg for node in nodes for arg in node.all_input_nodes if arg.op == "get_attr"]
        parameters, buffers = self.captured.tensors_read(nodes)
        if runs:
            with rollback(self.captured.module), self.in_training():
                self._nodes(training=True).open_layers(nodes)
        return ChunkStage(
            self,
            tuple(inputs),
            tuple(outputs),
            frozenset(node.name for node in (*nodes, *read)),
            tuple(parameters),
            tuple(buffers),
        )

    def run(
        self, stage: ChunkStage, values: Sequence[Any], chunk: int | None, *, training: bool
    ) -> list[Any]:
        """See :meth:`ChunkStage.__call__`."""
        graph, rows = self._nodes(training=training), self.rows(chunk)
        given = {graph.node[name]: v for name, v in zip(stage.inputs, values, strict=True)}
        is_whole = {node: graph.kinds[node] is NodeKind.WHOLE for node in given}
        graph.update({str(node.target): v for node, v in given.items() if is_whole[node]})
        own = {node: value for node, value in given.items() if not is_whole[node]}
        found = graph.run(graph.needed(stage.members), own, rows)
        return [graph.value(graph.node[name], found) for name in stage.outputs]


def _by_vertices(captured: CapturedModel, nodes: ChunkGraph) -> ModelGraph:
    """The model with vertices in the place of samples."""
    graph, num_vertices = captured.graph, nodes.around.num_vertices
    kinds = {node.name: kind for node, kind in nodes.kinds.items()}
    needs = _Needs(captured, nodes)
    inputs = tuple(
        replace(item, value=_value(item.value, NodeKind.ROWS, num_vertices))
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
            _value(value, kinds[value.name], num_vertices)
            for value, is_returned in zip(operator.outputs, returned, strict=True)
            if kinds[value.name] not in whole or is_returned
        )
        operators.append(replace(operator, inputs=needs.of(operator.name), outputs=outputs))
    return ModelGraph(inputs, tuple(operators), graph.outputs, graph.parameters)


def _value(value: Value, kind: NodeKind, num_vertices: int) -> Value:
    """A value whose rows are samples, if it has a row per vertex."""
    has_rows = [spec.shape[:1] == (num_vertices,) for spec in value.tensors]
    if kind is not NodeKind.ROWS or not has_rows or not all(has_rows):
        return replace(value, variation=Variation.WHOLE)
    tensors = tuple(replace(spec, batch_dim=0, vertex_dim=None) for spec in value.tensors)
    return Value(value.name, tensors, Variation.SAMPLES)


class _Needs:
    """Which values an operator needs, where it computes whole values by itself."""

    def __init__(self, captured: CapturedModel, nodes: ChunkGraph) -> None:
        self._captured, self._kinds = captured, nodes.kinds

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
            kind = self._kinds[node]
            if node.op == "placeholder" or kind not in (NodeKind.WHOLE, NodeKind.SIZE):
                found[node.name] = None
            elif kind is NodeKind.WHOLE:
                stack += reversed(node.all_input_nodes)
        return tuple(found)
