"""A captured model whose stages run on chunks of one graph's vertices."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lightning_gpp.capture import CapturedModel
from lightning_gpp.capture.values.samples import GraphInputs
from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.gnn.chunk_graph import ChunkGraph, NodeKind, Pass
from lightning_gpp.gnn.chunks import REMEDY, ChunkRows, Chunks, GraphTrainingError
from lightning_gpp.gnn.history import Surroundings, Techniques
from lightning_gpp.gnn.message_passing import Mixing, is_message_passing
from lightning_gpp.graph import ModelGraph, OpNode, Value, Variation
from lightning_gpp.graph.graph_parallel import in_ways

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ChunkStage:
    """Some operators, run on one chunk at a time.

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
        model = self.model
        graph, given = model.nodes(training=training), dict(zip(self.inputs, values, strict=True))
        device = _device(values)
        graph.update({n: value for n, value in given.items() if n in graph.arguments}, device)
        passes: dict[int, Pass] = {}
        for way, members in self.members.items():
            rows = model.rows(chunk, way, device)
            passes[way] = graph.run(graph.needed(members), model.begun(graph, given, rows))

        def taken(name: str) -> Any:
            """A value that leaves the stage."""
            if name in given:  # it is only handed on
                return given[name]
            if (what := model.in_ways.values.get(name)) is not None:
                found = passes[what.way]
                value = graph.value(graph.node[what.name], found)
                return value if what.reader is None else chosen(value, found.rows.sent[what.reader])
            if name not in model.model.producer:
                return graph.value(graph.node[name], passes[min(passes)])
            operator = model.graph.operator[model.graph.producer[name]]
            parts = [taken(part) for part in operator.inputs]  # of all ways
            joined = _joined(parts) if len(parts) > 1 else parts[0]
            if len(parts) == 1 or chunk is not None:
                return joined
            ways = range(model.chunks.num_ways)
            order = torch.cat([model.rows(None, way, _device(parts)).vertices for way in ways])
            return chosen(joined, order.argsort())

        return [taken(name) for name in self.outputs]


class ChunkedModel:
    """A model whose stages run on chunks of the vertices of one graph.

    Args:
        captured: the model, captured with the whole graph.
        tensors: arguments of its forward by name.
        chunks: of the vertices.
        techniques: how histories are used.
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
        example: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.captured = captured
        num_example = chunks.num_vertices if example is None else _num_vertices(example)
        self.around = Surroundings(chunks, num_example, techniques)
        self._rows: dict[tuple[int | None, int, torch.device], ChunkRows] = {}
        staying = captured.graph.staying
        self._whole = {name: tensor for name, tensor in tensors.items() if name in staying}
        self._graphs: dict[bool, ChunkGraph] = {}
        self._check_layers()
        if example is not None:
            self.nodes(training=True).check_guards()
        sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.model = by_vertices(captured, self.nodes(training=True), sizes)
        exchanged: set[tuple[str, str]] = set()
        if chunks.num_ways > 1:
            exchanged.update(self._exchanged())
            self.around.mirror()
        self.in_ways = in_ways(self.model, self.chunks.shares, exchanged)

    def _check_layers(self) -> None:
        module, nodes = self.captured.module, self.captured.all_nodes(training=True)
        for node in nodes:
            if node.op == "call_module" and is_message_passing(
                layer := module.get_submodule(str(node.target))
            ):
                raise GraphTrainingError(
                    f"the layer {node.target} ({type(layer).__name__}) cannot run on chunks of "
                    f"vertices: {'; '.join(self.captured.kept_whole)}; {REMEDY}"
                )
        if not any(isinstance(node.target, Mixing) for node in nodes):
            raise GraphTrainingError(
                f"{type(module).__name__} has no message-passing layer of "
                "torch_geometric, which full-graph training in chunks is for; use "
                'strategy="graphpipe"'
            )

    @property
    def chunks(self) -> Chunks:
        """The chunks of the vertices."""
        return self.around.chunks

    @property
    def graph(self) -> ModelGraph:
        """The model as data, an operator per way."""
        return self.in_ways.graph

    def _exchanged(self) -> Iterator[tuple[str, str]]:
        """(operator, value) that is read of the sources of messages; all edges are known then."""
        graph = self.nodes(training=True)
        for item in self.model.inputs:
            if item.requires_grad:
                raise GraphTrainingError(
                    f"the argument {item.value.name} requires gradients, which only ways=1 gives "
                    "to layers before the pipelined forward: use it, or move them into the forward"
                )
        operator_of = {n: each for each in self.model for n in self.captured.nodes(each.name)}
        for messages, arg in graph.exchanged:
            operator = operator_of[messages]
            if operator_of.get(arg) is operator:
                raise GraphTrainingError(
                    f"{operator.target} computes the rows that its messages read inside of itself, "
                    "where devices cannot exchange them; use ways=1"
                )
            if arg.op != "placeholder":
                yield operator.name, arg.name
        for node in graph.nodes:
            if isinstance(node.target, Mixing):
                graph.edge_set(node)

    def nodes(self, *, training: bool) -> ChunkGraph:
        """The nodes of the forward in a mode."""
        if training not in self._graphs:
            captured, nodes = self.captured, self.captured.all_nodes(training=training)
            what = captured.module, nodes, captured.graph.staying, self._whole, self.around
            self._graphs[training] = ChunkGraph(*what)
        return self._graphs[training]

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

    def keep_arguments(self, names: Collection[str]) -> None:
        """Lets go of the arguments that stay on the stages, but for those that are read here.

        Args:
            names: inputs of all stages that are going to run.
        """
        for name in self._whole.keys() - set(names):
            del self._whole[name]
            for graph in self._graphs.values():
                graph.arguments.pop(name)

    def begin_epoch(self) -> None:
        """A training pass over all chunks begins."""
        self.around.epoch += 1
        for history in self.around.histories.values():
            history.begin_epoch(self.around.epoch)

    def stage(
        self, operators: Sequence[str], inputs: Sequence[str], outputs: Sequence[str]
    ) -> ChunkStage:
        """A stage that runs on chunks.

        Args:
            operators: of :attr:`graph`.
            inputs: names of the values it will be called with.
            outputs: names of the values to return.
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
        return ChunkStage(
            self,
            tuple(inputs),
            tuple(outputs),
            {way: frozenset(names) for way, names in members.items()},
            tuple(sorted(parameters)),
            tuple(sorted(buffers)),
        )

    def begun(self, graph: ChunkGraph, given: Mapping[str, Any], rows: ChunkRows) -> Pass:
        """What one way's part of a chunk begins with."""
        found = Pass(rows, {})
        mirrored: dict[fx.Node, dict[int, Any]] = {}
        for name, value in given.items():
            what = self.in_ways.values.get(name)
            node = graph.node[name if what is None else what.name]
            if node.op == "placeholder" and graph.kinds[node] is NodeKind.WHOLE:
                continue
            if what is None or (what.reader is None and what.way == rows.way):
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


# The model as data, with vertices in the place of samples --------------------------------------


def _num_vertices(tensors: Mapping[str, Tensor]) -> int:
    found = GraphInputs.find(tensors)
    assert found is not None  # the graph was looked at before
    return found.num_nodes


def by_vertices(
    captured: CapturedModel, nodes: ChunkGraph, sizes: Mapping[str, tuple[int, ...]]
) -> ModelGraph:
    """The model with vertices in the place of samples.

    Args:
        captured: the model.
        nodes: its calls.
        sizes: shapes of its arguments.
    """
    graph, around = captured.graph, nodes.around
    kinds = {node.name: kind for node, kind in nodes.kinds.items()}

    def given(value: Value) -> Value:
        tensors = tuple(replace(spec, shape=sizes[value.name]) for spec in value.tensors)
        return _value(replace(value, tensors=tensors), NodeKind.ROWS, around)

    inputs = tuple(replace(item, value=given(item.value)) for item in graph.inputs)
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
