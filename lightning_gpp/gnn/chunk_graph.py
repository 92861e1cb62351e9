"""A traced forward that runs on one chunk of vertices at a time, its layers opened."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx

from lightning_gpp.capture.operators.observe import run_node
from lightning_gpp.capture.tracing.trace import guard
from lightning_gpp.gnn.chunk_values import ChunkValues, narrow
from lightning_gpp.gnn.graph_values import GraphValues
from lightning_gpp.gnn.message_passing import Mixing, OpenedLayer, is_layer, open_layer
from lightning_gpp.gnn.messages import messages, read_by_messages
from lightning_gpp.gnn.node_kinds import NodeKind, Pass


class ChunkGraph:
    """The nodes of a forward, run for chunks.

    Args:
        graph: the nodes, and what is known of them.
        wide: those whose values have the rows of mirrors, too.
    """

    def __init__(self, graph: GraphValues, wide: frozenset[fx.Node] = frozenset()) -> None:
        self.graph, self.values = graph, ChunkValues(graph, wide)
        self.node = {node.name: node for node in graph.nodes}
        self._layers: dict[fx.Node, _Layer] = {}

    def update(self, whole: Mapping[str, Tensor]) -> None:
        """Takes the arguments that are the same for all chunks; computes what they changed."""
        if self.graph.update(whole):
            self.values.clear()
            self._layers.clear()

    def needed(self, members: Collection[str]) -> list[fx.Node]:
        """The nodes that have to run for each chunk, of those with some names."""
        per_chunk = (NodeKind.ROWS, NodeKind.EDGES, NodeKind.WEIGHTS)
        return [
            node
            for node in self.graph.nodes
            if node.name in members
            and self.graph.kinds[node] in per_chunk
            and node.op != "placeholder"
            and node.target is not guard
        ]

    def run(self, nodes: Sequence[fx.Node], found: Pass) -> Pass:
        """Runs nodes on the vertices of a chunk.

        Args:
            nodes: of :meth:`needed`, in order.
            found: what is known; gets what they make.
        """
        graph = self.graph
        opens = not found.rows.is_everything or graph.around.fills
        for node in nodes:
            if isinstance(node.target, Mixing):
                value = messages(node, self.values, found)
            elif is_layer(node, graph.module) and opens:
                value = self._layer(node).run(node, found, self.values)
            else:
                met = partial(self.values.met, node=node, found=found)
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), met)
                value = run_node(node, graph.module, args, kwargs, {})
            found.values[node] = value
        return found

    def read_along_edges(self, node: fx.Node) -> frozenset[fx.Node]:
        """What a layer reads of the sources of messages; it is opened for that."""
        return self._layer(node).wide(node)

    def open_layers(self, nodes: Iterable[fx.Node]) -> None:
        """Opens the layers among some nodes, which the first chunk would do otherwise."""
        for node in nodes:
            if is_layer(node, self.graph.module):
                self._layer(node)

    def _layer(self, node: fx.Node) -> _Layer:
        if node not in self._layers:
            self._layers[node] = _Layer.of(node, self.graph)
        return self._layers[node]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A message-passing layer within a graph of nodes."""

    inner: ChunkGraph
    nodes: list[fx.Node]
    inputs: Mapping[str, fx.Node]
    opened: OpenedLayer

    @classmethod
    def of(cls, node: fx.Node, outer: GraphValues) -> _Layer:
        """Opens the layer that a node calls."""
        module = outer.module.get_submodule(str(node.target))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), outer.example)
        name = str(node.target) or type(module).__name__
        opened = open_layer(module, args, kwargs, name)
        tensors = opened.arguments.tensors(args, kwargs)
        given = dict(_tensors_by_name(opened, node))
        whole = {
            name: tensor
            for name, tensor in tensors.items()
            if outer.kinds[given[name]] is NodeKind.WHOLE
        }
        small = None
        if outer.has_example:
            small = {name: tensor for name, tensor in tensors.items() if name in whole}
            whole = {name: outer.whole[given[name]] for name in whole}
        nodes = [found for found in opened.trace.graph.nodes if found.op != "output"]
        weights = frozenset(
            name for name, arg in given.items() if outer.kinds[arg] is NodeKind.WEIGHTS
        )
        path = f"{outer.name}{node.name}"
        values = GraphValues(path, module, nodes, whole, outer.around, weights, small)
        wide = read_by_messages(values) if outer.around.num_ways > 1 else frozenset()
        inner = ChunkGraph(values, wide)
        inputs = {str(found.target): found for found in nodes if found.op == "placeholder"}
        needed = inner.needed({found.name for found in nodes})
        return cls(inner, needed, inputs, opened)

    def wide(self, node: fx.Node) -> frozenset[fx.Node]:
        """The arguments of which the rows of mirrors are read."""
        given = dict(_tensors_by_name(self.opened, node))
        wide = self.inner.values.wide
        return frozenset(given[name] for name, place in self.inputs.items() if place in wide)

    def run(self, node: fx.Node, around: Pass, outer: ChunkValues) -> Any:
        """What the layer returns for the rows of a chunk."""

        def met(arg: fx.Node) -> Any:
            if outer.graph.kinds[arg] is NodeKind.WHOLE:
                return outer.graph.whole[arg]
            return around.wide[arg] if arg in around.wide else outer.value(arg, around)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), met)
        tensors = self.opened.arguments.tensors(args, kwargs)
        wide = {n for n, arg in _tensors_by_name(self.opened, node) if arg in around.wide}
        given: dict[fx.Node, Any] = {}
        values = self.inner.values
        for name, place in self.inputs.items():
            if values.graph.kinds[place] is not NodeKind.WHOLE:
                is_narrow = name in wide and place not in values.wide
                given[place] = narrow(tensors[name], around.rows) if is_narrow else tensors[name]
        found = self.inner.run(self.nodes, Pass(around.rows, given))
        leaves = [
            values.value(leaf, found) if isinstance(leaf, fx.Node) else leaf
            for leaf in self.opened.trace.outputs
        ]
        return self.opened.trace.output.unflatten(leaves)


def _tensors_by_name(opened: OpenedLayer, node: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    """The arguments of a layer's forward by name, and the nodes that stand for them."""
    leaves = opened.arguments.flat(node.args, node.kwargs)[0]
    for name, leaf in zip(opened.arguments.names, leaves, strict=True):
        if name is not None:
            yield name, leaf
