"""A traced forward that runs on one chunk of vertices at a time, its layers opened.

Messages into a chunk come from its own vertices, from mirrors, and from those of other chunks out
of histories.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lightning_gpp.capture.operators.observe import run_node
from lightning_gpp.capture.tracing.trace import Trace, guard
from lightning_gpp.capture.values.arguments import Arguments
from lightning_gpp.gnn.chunks import ChunkEdges, ChunkRows, EdgeSet
from lightning_gpp.gnn.errors import GraphTrainingError
from lightning_gpp.gnn.graph_values import GraphValues
from lightning_gpp.gnn.history import History, exchanged
from lightning_gpp.gnn.message_passing import Mixing, is_dropout, is_layer, open_layer
from lightning_gpp.gnn.node_kinds import NodeKind, Pass

_NOT_PASSED = frozenset({"size", "edge_index"})


class ChunkGraph:
    """The nodes of a forward, run for chunks.

    Args:
        graph: the nodes, and what is known of them.
        wide: those whose values have the rows of mirrors, too.
    """

    def __init__(self, graph: GraphValues, wide: frozenset[fx.Node] = frozenset()) -> None:
        self.graph, self.wide = graph, wide
        self.node = {node.name: node for node in graph.nodes}
        self._layers: dict[fx.Node, _Layer] = {}
        self._cut: dict[tuple[int, int, int | None, int], Tensor] = {}

    def update(self, whole: Mapping[str, Tensor]) -> None:
        """Takes the arguments that are the same for all chunks; computes what they changed."""
        if self.graph.update(whole):
            self._cut.clear()
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
                value = self._messages(node, node.target, found)
            elif is_layer(node, graph.module) and opens:
                value = self._layer(node).run(node, found, self)
            else:
                met = partial(self._met, node=node, found=found)
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), met)
                value = run_node(node, graph.module, args, kwargs, {})
            found.values[node] = value
        return found

    def read_along_edges(self, node: fx.Node) -> frozenset[fx.Node]:
        """What a layer reads of the sources of messages; it is opened for that."""
        layer = self._layer(node)
        given = dict(layer.named_arguments(node))
        return frozenset(given[n] for n, place in layer.inputs.items() if place in layer.inner.wide)

    def open_layers(self, nodes: Iterable[fx.Node]) -> None:
        """Opens the layers among some nodes, which the first chunk would do otherwise."""
        for node in nodes:
            if is_layer(node, self.graph.module):
                self._layer(node)

    def _layer(self, node: fx.Node) -> _Layer:
        if node not in self._layers:
            self._layers[node] = _Layer.of(node, self.graph)
        return self._layers[node]

    # Values as a chunk sees them -------------------------------------------------------------

    def value(self, node: fx.Node, found: Pass, *, wide: bool = False) -> Any:
        """A value as the rows of a chunk see it, whole ones cut.

        Args:
            node: whose.
            found: what is known.
            wide: whether the rows of mirrors are asked for.
        """
        kind = self.graph.kinds[node]
        if kind is NodeKind.SIZE:
            return self._size(node, found, wide=wide)
        if kind is not NodeKind.WHOLE:
            value = found.values[node]
            return value if wide or node not in self.wide else _narrow(value, found.rows)
        if (node, wide) not in found.cut:
            found.cut[node, wide] = self._per_row(node, found.rows, wide=wide)
        return found.cut[node, wide]

    def _met(self, arg: fx.Node, node: fx.Node, found: Pass) -> Any:
        """An argument as a node meets it."""
        kinds = self.graph.kinds
        if kinds[node] is NodeKind.WEIGHTS:
            return self._as_is(arg, found)
        if kinds[node] is NodeKind.EDGES and kinds[arg] in (NodeKind.WHOLE, NodeKind.WEIGHTS):
            return self._per_edge(self._as_is(arg, found), self.graph.edge_sets[node], found.rows)
        return self.value(arg, found, wide=node in self.wide)

    def _as_is(self, arg: fx.Node, found: Pass) -> Any:
        """A value that is not cut."""
        return found.values[arg] if arg in found.values else self.graph.whole_value(arg)

    def _per_edge(self, value: Any, edges: EdgeSet, rows: ChunkRows) -> Any:
        """A value with a row per edge of the graph, for the edges into a chunk."""
        if rows.is_everything or not isinstance(value, Tensor):
            return value
        if value.shape[:1] != (edges.edge_index.shape[1],):
            return value
        key = (id(value), id(edges), rows.chunk, rows.way)
        if value.requires_grad or key not in self._cut:
            chosen = value.index_select(0, edges.of(rows).edges)
            if value.requires_grad:
                return chosen
            self._cut[key] = chosen
        return self._cut[key]

    def _per_row(self, node: fx.Node, rows: ChunkRows, *, wide: bool) -> Any:
        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.shape[:1] != (self.graph.around.num_vertices,):
                return leaf
            part = rows.of(leaf, wide=wide)
            return part.clone() if part is leaf and node in self.graph.changed else part

        return pytree.tree_map(cut, self.graph.whole[node])

    def _size(self, node: fx.Node, found: Pass, *, wide: bool) -> Any:
        def known(arg: fx.Node) -> Any:
            return self.value(arg, found, wide=wide) if arg in found.values else None

        return self.graph.size(node, found.rows, wide=wide, known=known)

    # Messages --------------------------------------------------------------------------------

    def _messages(self, node: fx.Node, mixing: Mixing, found: Pass) -> Any:
        """Passes messages into the rows of a chunk; histories take what it has."""
        graph, rows, edges = self.graph, found.rows, self.graph.edge_sets[node]
        named = {name: arg for name, arg in node.kwargs.items() if name not in _NOT_PASSED}
        if rows.is_everything:
            whole = fx.node.map_arg(named, partial(self._as_is, found=found))
            if graph.around.fills:
                self._fill(node, whole, rows)
            return mixing.along(edges.edge_index, **whole)
        into = edges.of(rows)
        passed: dict[str, Any] = {}
        for name, arg in named.items():
            kind = graph.kinds[arg] if isinstance(arg, fx.Node) else None
            is_whole_row = kind is NodeKind.WHOLE and mixing.is_of_vertices(name)
            if isinstance(arg, tuple | list) and len(arg) == 2:
                source, target = arg
            elif kind is NodeKind.ROWS or is_whole_row:
                source = target = arg
            elif isinstance(arg, fx.Node):
                is_own = kind is NodeKind.EDGES
                value = found.values[arg] if is_own else self._as_is(arg, found)
                passed[name] = value if is_own else self._per_edge(value, edges, rows)
                continue
            else:
                passed[name] = arg
                continue
            at_target = self.value(target, found) if isinstance(target, fx.Node) else target
            passed[name] = self._at_sources(node, name, source, into, found), at_target
        size = (len(into.sources), len(rows.vertices))
        return mixing.along(into.local, size=size, **passed)

    def _fill(self, node: fx.Node, given: Mapping[str, Any], rows: ChunkRows) -> None:
        """Writes what a pass over all vertices reads into the histories."""
        for name, value in given.items():
            arg = node.kwargs[name]
            if isinstance(arg, tuple | list):
                arg, value = arg[0], value[0]
            if isinstance(arg, fx.Node) and self.graph.kinds[arg] is NodeKind.ROWS:
                self._history(node, name, value, rows).take(rows, value)

    def _history(self, node: fx.Node, name: str, like: Tensor, rows: ChunkRows) -> History:
        """The history of an argument of a message."""
        key = rows.way, f"{self.graph.name}/{node.name}", name
        return self.graph.around.history(key, like)

    def _at_sources(self, node: fx.Node, name: str, arg: Any, into: ChunkEdges, found: Pass) -> Any:
        """An argument of a message at the sources of the edges."""
        if not isinstance(arg, fx.Node):
            return arg
        if self.graph.kinds[arg] is NodeKind.WHOLE:
            value = self.graph.whole[arg]
            return value.index_select(0, into.sources) if isinstance(value, Tensor) else value
        own, rows = found.values[arg], found.rows
        if not rows.is_alone:
            return exchanged(own, self._history(node, name, own, rows), rows, into)
        if self.graph.around.fills:
            self._history(node, name, own, rows).take(rows, own)
        return own.index_select(0, into.own_rows)


def read_by_messages(graph: GraphValues) -> frozenset[fx.Node]:
    """What has to run for the rows of mirrors, too, in a layer: what messages read of sources.

    Raises:
        GraphTrainingError: there is something that cannot.
    """
    stack: list[fx.Node] = []
    for node in graph.nodes:
        for name, arg in node.kwargs.items() if isinstance(node.target, Mixing) else ():
            source = arg[0] if isinstance(arg, tuple | list) and len(arg) == 2 else arg
            if name not in _NOT_PASSED and isinstance(source, fx.Node):
                stack.append(source)
    found: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in found or graph.kinds[node] is not NodeKind.ROWS:
            continue
        why = ""
        if isinstance(node.target, Mixing) or is_layer(node, graph.module):
            why = "passes messages more than once"
        elif is_dropout(node, graph.module):
            why = "drops features before it passes messages"
        if why:
            raise GraphTrainingError(
                f"the layer {graph.name} ({type(graph.module).__name__}) {why}, which ways would "
                "have to do together; use ways=1"
            )
        found.add(node)
        stack += node.all_input_nodes
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A message-passing layer within a graph of nodes, opened."""

    inner: ChunkGraph
    nodes: list[fx.Node]
    inputs: Mapping[str, fx.Node]
    arguments: Arguments
    trace: Trace

    @classmethod
    def of(cls, node: fx.Node, outer: GraphValues) -> _Layer:
        """Opens the layer that a node calls."""
        module = outer.module.get_submodule(str(node.target))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), outer.example)
        name = str(node.target) or type(module).__name__
        arguments, trace = open_layer(module, args, kwargs, name)
        given = dict(_named(arguments, node))
        kinds = {name: outer.kinds[arg] for name, arg in given.items()}
        small = {
            name: tensor
            for name, tensor in arguments.tensors(args, kwargs).items()
            if kinds[name] is NodeKind.WHOLE
        }
        whole = {n: outer.whole[given[n]] for n in small} if outer.has_example else small
        nodes = [found for found in trace.graph.nodes if found.op != "output"]
        weights = frozenset(name for name, kind in kinds.items() if kind is NodeKind.WEIGHTS)
        values = GraphValues(
            f"{outer.name}{node.name}",
            *(module, nodes, whole, outer.around, weights),
            small=small if outer.has_example else None,
        )
        wide = read_by_messages(values) if outer.around.num_ways > 1 else frozenset()
        inner = ChunkGraph(values, wide)
        inputs = {str(found.target): found for found in nodes if found.op == "placeholder"}
        return cls(inner, inner.needed({n.name for n in nodes}), inputs, arguments, trace)

    def named_arguments(self, node: fx.Node) -> Iterator[tuple[str, fx.Node]]:
        """The arguments of the layer's forward by name, and the nodes that stand for them."""
        return _named(self.arguments, node)

    def run(self, node: fx.Node, around: Pass, outer: ChunkGraph) -> Any:
        """What the layer returns for the rows of a chunk."""

        def met(arg: fx.Node) -> Any:
            if outer.graph.kinds[arg] is NodeKind.WHOLE:
                return outer.graph.whole[arg]
            return around.wide[arg] if arg in around.wide else outer.value(arg, around)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), met)
        tensors, inner = self.arguments.tensors(args, kwargs), self.inner
        wide = {name for name, arg in self.named_arguments(node) if arg in around.wide}
        given: dict[fx.Node, Any] = {}
        for name, place in self.inputs.items():
            if inner.graph.kinds[place] is not NodeKind.WHOLE:
                is_narrow = name in wide and place not in inner.wide
                given[place] = _narrow(tensors[name], around.rows) if is_narrow else tensors[name]
        found = inner.run(self.nodes, Pass(around.rows, given))
        leaves = [
            inner.value(leaf, found) if isinstance(leaf, fx.Node) else leaf
            for leaf in self.trace.outputs
        ]
        return self.trace.output.unflatten(leaves)


def _named(arguments: Arguments, node: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    leaves = arguments.flat(node.args, node.kwargs)[0]
    for name, leaf in zip(arguments.names, leaves, strict=True):
        if name is not None:
            yield name, leaf


def _narrow(value: Any, rows: ChunkRows) -> Any:
    """Of extended rows those of the part."""
    return pytree.tree_map_only(Tensor, rows.narrow, value)
