"""A captured model as stages that run on chunks of the vertices of one graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lightning_gpp.capture import CapturedModel
from lightning_gpp.capture.checks.rollback import rollback, training_flags
from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.gnn.by_vertices import by_vertices, num_vertices_of
from lightning_gpp.gnn.chunk_graph import ChunkGraph
from lightning_gpp.gnn.chunks import ChunkRows, Chunks
from lightning_gpp.gnn.errors import GraphTrainingError
from lightning_gpp.gnn.graph_values import NodeKind, Pass, Surroundings
from lightning_gpp.gnn.history import Techniques
from lightning_gpp.gnn.message_passing import is_layer
from lightning_gpp.graph import ModelGraph
from lightning_gpp.graph.graph_parallel import in_ways

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ChunkStage:
    """Some operators, which run on one chunk at a time.

    Attributes:
        model: whose.
        inputs: names of the values that it is called with.
        outputs: names of the values that it returns.
        members: way -> names of the calls that belong to it.
        parameter_names: canonical names of the parameters it reads.
        buffer_names: canonical names of the buffers it reads.
    """

    model: ChunkedModel
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    members: Mapping[int, frozenset[str]]
    parameter_names: tuple[str, ...]
    buffer_names: tuple[str, ...]

    def __call__(self, values: Sequence[Any], chunk: int | None, *, training: bool) -> list[Any]:
        """The values that leave it, of one chunk; of all vertices if ``chunk`` is None.

        Args:
            values: that enter it: arguments of forward that stay whole, others of the rows of the
                chunk.
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
        example: the arguments that the model was captured with, if these are others: a small graph.

    Attributes:
        in_ways: the model as data, in which vertices are the samples: what depends on the graph
            alone is no operator, but computed by every stage that reads it.

    Raises:
        GraphTrainingError: the model cannot run in chunks, or not in several ways.
    """

    def __init__(
        self,
        captured: CapturedModel,
        tensors: Mapping[str, Tensor],
        chunks: Chunks,
        techniques: Techniques,
        flags: Mapping[str, bool],
        example: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.captured = captured
        num_example = chunks.num_vertices if example is None else num_vertices_of(example)
        self.around = Surroundings(chunks, num_example, techniques)
        self._flags = dict(flags)
        self._rows: dict[tuple[int | None, int, torch.device], ChunkRows] = {}
        staying = captured.graph.staying
        self._whole = {name: tensor for name, tensor in tensors.items() if name in staying}
        self._small = example and {name: example[name] for name in self._whole}
        self._graphs: dict[bool, ChunkGraph] = {}
        nodes = captured.all_nodes(training=True)
        if not any(is_layer(node, captured.module) for node in nodes):
            raise GraphTrainingError(
                f"{type(captured.module).__name__} has no message-passing layer of "
                "torch_geometric, which full-graph training in chunks is for; use "
                'strategy="graphpipe"'
            )
        sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.model = by_vertices(captured, self._nodes(training=True), sizes)
        exchanged: set[tuple[str, str]] = set()
        if chunks.num_ways > 1:
            exchanged.update(self._exchanged())  # opens all layers, so that their edges are known
            self.around.mirror()
        self.in_ways = in_ways(self.model, self.chunks.shares, exchanged)

    @property
    def chunks(self) -> Chunks:
        """The chunks of the vertices."""
        return self.around.chunks

    @property
    def graph(self) -> ModelGraph:
        """The model as data, an operator per way."""
        return self.in_ways.graph

    def _exchanged(self) -> Iterator[tuple[str, str]]:
        """(operator, value) that is read of the sources of messages."""
        graph = self._nodes(training=True)
        for item in self.model.inputs:
            if item.requires_grad:
                raise GraphTrainingError(
                    f"the argument {item.value.name} requires gradients, as something trainable "
                    "comes before the pipelined forward; ways have it in the forward itself: move "
                    "it there, or use ways=1"
                )
        for operator in self.model:
            nodes = self.captured.nodes(operator.name)
            self._open(nodes)
            for node in nodes:
                read = is_layer(node, graph.module) and graph.layer(node).read_along_edges(node)
                for arg in read or ():
                    if arg in nodes:
                        raise GraphTrainingError(
                            f"{operator.target} computes what its messages read by itself, so ways "
                            "cannot exchange it; use ways=1"
                        )
                    if graph.kinds[arg] is NodeKind.ROWS and arg.op != "placeholder":
                        yield operator.name, arg.name

    def _nodes(self, *, training: bool) -> ChunkGraph:
        if training not in self._graphs:
            captured, whole = self.captured, self._whole
            what = "", captured.module, captured.all_nodes(training=training), whole, self.around
            self._graphs[training] = ChunkGraph(*what, small=self._small)
        return self._graphs[training]

    def in_training(self) -> AbstractContextManager[None]:
        """Sub-modules are in the modes of training."""
        return training_flags(self.captured.module, self._flags)

    def rows(self, chunk: int | None, way: int = 0, device: torch.device = CPU) -> ChunkRows:
        """The vertices of a part of a chunk; all of a way for None."""
        key = chunk, way, device
        if key not in self._rows:
            self._rows[key] = self.chunks.rows(chunk, way).on(device)
        return self._rows[key]

    def filling(self) -> AbstractContextManager[None]:
        """A pass over all vertices writes what layers read into the histories."""
        return instance_attribute(self.around, "fills", True)

    def forget(self) -> None:
        """Histories and epochs begin anew."""
        self.around.histories.clear()
        self.around.epoch = -1

    def begin_epoch(self) -> None:
        """A training pass over all chunks begins."""
        self.around.epoch += 1
        for history in self.around.histories.values():
            history.begin_epoch(self.around.epoch)

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
        members: dict[int, set[str]] = {}
        parameters: dict[str, None] = {}
        buffers: dict[str, None] = {}
        for name in operators:
            if name not in self.in_ways.operators:  # it joins what the ways made
                continue
            operator, way = self.in_ways.operators[name]
            nodes = self.captured.nodes(operator)
            read = [arg for node in nodes for arg in node.all_input_nodes if arg.op == "get_attr"]
            members.setdefault(way, set()).update(node.name for node in (*nodes, *read))
            for found, names in zip((parameters, buffers), self.captured.tensors_read(nodes)):
                found.update(dict.fromkeys(names))
            if runs:
                self._open(nodes)
        return ChunkStage(
            self,
            tuple(inputs),
            tuple(outputs),
            {way: frozenset(names) for way, names in members.items()},
            tuple(sorted(parameters)),
            tuple(sorted(buffers)),
        )

    def _open(self, nodes: Sequence[fx.Node]) -> None:
        with rollback(self.captured.module), self.in_training():
            self._nodes(training=True).open_layers(nodes)

    def run(
        self, stage: ChunkStage, values: Sequence[Any], chunk: int | None, *, training: bool
    ) -> list[Any]:
        """See :meth:`ChunkStage.__call__`."""
        graph, given = self._nodes(training=training), dict(zip(stage.inputs, values, strict=True))
        graph.update({n: value for n, value in given.items() if n in graph.arguments})
        passes: dict[int, Pass] = {}
        for way, members in stage.members.items():
            rows = self.rows(chunk, way, _device(values))
            passes[way] = graph.run(graph.needed(members), self._begun(graph, given, rows))

        def taken(name: str) -> Any:
            """A value that leaves the stage."""
            if name in given:  # it is only handed on
                return given[name]
            if (what := self.in_ways.values.get(name)) is not None:
                found = passes[what.way]
                value = graph.value(graph.node[what.name], found)
                return value if what.reader is None else chosen(value, found.rows.sent[what.reader])
            if name not in self.model.producer:
                return graph.value(graph.node[name], passes[min(passes)])
            operator = self.graph.operator[self.graph.producer[name]]
            parts = [taken(part) for part in operator.inputs]  # of all ways
            joined = _joined(parts) if len(parts) > 1 else parts[0]
            if len(parts) == 1 or chunk is not None:
                return joined
            ways = range(self.chunks.num_ways)
            order = torch.cat([self.rows(None, way, _device(parts)).vertices for way in ways])
            return chosen(joined, order.argsort())

        return [taken(name) for name in stage.outputs]

    def _begun(self, graph: ChunkGraph, given: Mapping[str, Any], rows: ChunkRows) -> Pass:
        """What one way's part of a chunk begins with."""
        found = Pass(rows, {})
        mirrored: dict[fx.Node, dict[int, Any]] = {}
        for name, value in given.items():
            what = self.in_ways.values.get(name)
            node = graph.node[name if what is None else what.name]
            if graph.kinds[node] is NodeKind.WHOLE:
                continue
            if what is None and node.name in self.model.staying:  # it is whole
                found.values[node] = rows.of(value)
                if not rows.is_narrow:
                    found.wide[node] = rows.of(value, wide=True)
            elif what is None or (what.reader is None and what.way == rows.way):
                found.values[node] = value
            elif what.reader == rows.way:
                mirrored.setdefault(node, {})[what.way] = value
        for node, by_way in mirrored.items():
            found.wide[node] = _joined([found.values[node], *(by_way[w] for w in sorted(by_way))])
        return found


def _device(values: Sequence[Any]) -> torch.device:
    found = (leaf for leaf in pytree.tree_leaves(list(values)) if isinstance(leaf, Tensor))
    return next((tensor.device for tensor in found), CPU)


def _joined(parts: Sequence[Any]) -> Any:
    """Rows of several parts, one after the other."""
    return pytree.tree_map(lambda *leaves: torch.cat(leaves), *parts)


def chosen(value: Any, rows: Tensor) -> Any:
    """Some rows of a value's tensors."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.index_select(0, rows), value)
