"""The nodes of a forward, run on the vertices of one chunk.

What reads no other vertices runs on the rows of the chunk; layers are opened, and the sources of
the messages into a chunk come from its own vertices, from mirrors, and from those of other chunks
out of histories.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx

from lightning_gpp.capture.operators.observe import run_node
from lightning_gpp.capture.tracing.trace import Trace, guard
from lightning_gpp.capture.values.arguments import Arguments
from lightning_gpp.gnn.chunks import ChunkEdges, ChunkRows, EdgeSet
from lightning_gpp.gnn.errors import GraphTrainingError
from lightning_gpp.gnn.graph_values import GraphValues, NodeKind, Pass
from lightning_gpp.gnn.history import History, exchanged
from lightning_gpp.gnn.message_passing import Mixing, is_dropout, is_layer, open_layer

_NOT_PASSED = frozenset({"size", "edge_index"})


class ChunkGraph(GraphValues):
    """The nodes of a forward, run for chunks; arguments as :class:`GraphValues` has them."""

    def _compute(self) -> None:
        self.node = {node.name: node for node in self.nodes}
        self._layers: dict[fx.Node, _Layer] = {}
        self._cut: dict[tuple[int, int, int | None, int], Tensor] = {}
        super()._compute()

    def needed(self, members: Collection[str]) -> list[fx.Node]:
        """The nodes that have to run for each chunk, of those with some names."""
        per_chunk = (NodeKind.ROWS, NodeKind.EDGES, NodeKind.WEIGHTS)
        return [
            node
            for node in self.nodes
            if node.name in members
            and self.kinds[node] in per_chunk
            and node.op != "placeholder"
            and node.target is not guard
        ]

    def run(self, nodes: Sequence[fx.Node], found: Pass) -> Pass:
        """Runs nodes on the vertices of a chunk.

        Args:
            nodes: of :meth:`needed`, in order.
            found: what is known; gets what they make.
        """
        opens = not found.rows.is_everything or self.around.fills
        for node in nodes:
            if isinstance(node.target, Mixing):
                value = self._messages(node, node.target, found)
            elif opens and is_layer(node, self.module):
                value = self.layer(node).run(node, found, self)
            else:
                met = partial(self._met, node=node, found=found)
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), met)
                value = run_node(node, self.module, args, kwargs, {})
            found.values[node] = value
        return found

    def layer(self, node: fx.Node) -> _Layer:
        """The layer that a node calls, opened."""
        if node not in self._layers:
            self._layers[node] = _Layer.of(node, self)
        return self._layers[node]

    def open_layers(self, nodes: Iterable[fx.Node]) -> None:
        """Opens the layers among some nodes, which the first chunk would do otherwise."""
        for node in nodes:
            if is_layer(node, self.module):
                self.layer(node)

    # Values as a chunk sees them -------------------------------------------------------------

    def _met(self, arg: fx.Node, node: fx.Node, found: Pass) -> Any:
        """An argument as a node meets it."""
        kind, given = self.kinds[node], self.kinds[arg]
        if kind is NodeKind.WEIGHTS:
            return self._as_is(arg, found)
        if kind is NodeKind.EDGES and given in (NodeKind.WHOLE, NodeKind.WEIGHTS):
            return self._per_edge(self._as_is(arg, found), self.edge_sets[node], found.rows)
        return self.value(arg, found, wide=node in self.wide)

    def _as_is(self, arg: fx.Node, found: Pass) -> Any:
        """A value that is not cut."""
        return found.values[arg] if arg in found.values else self.whole_value(arg)

    def _per_edge(self, value: Any, edges: EdgeSet, rows: ChunkRows) -> Any:
        """A value with a row per edge of the graph, for the edges into a chunk."""
        if rows.is_everything or not isinstance(value, Tensor):
            return value
        if value.shape[:1] != (edges.edges.tensor.shape[1],):
            return value
        if value.requires_grad:
            return value.index_select(0, edges.of(rows).edges)
        key = (id(value), id(edges), rows.chunk, rows.way)
        if key not in self._cut:
            self._cut[key] = value.index_select(0, edges.of(rows).edges)
        return self._cut[key]

    # Messages --------------------------------------------------------------------------------

    def _messages(self, node: fx.Node, mixing: Mixing, found: Pass) -> Any:
        """Passes messages into the rows of a chunk; histories take what it has."""
        rows, edges = found.rows, self.edge_sets[node]
        named = {name: arg for name, arg in node.kwargs.items() if name not in _NOT_PASSED}
        if rows.is_everything:
            whole = fx.node.map_arg(named, partial(self._as_is, found=found))
            for name, value in whole.items() if self.around.fills else ():
                source, value = _ends(named[name])[0], _ends(value)[0]
                if isinstance(source, fx.Node) and self.kinds[source] is NodeKind.ROWS:
                    self._history(node, name, value, rows).take(rows, value)
            return mixing.along(edges.edges.tensor, **whole)
        into = edges.of(rows)

        def passed(name: str, arg: Any) -> Any:
            kind = self.kinds[arg] if isinstance(arg, fx.Node) else None
            is_whole_row = kind is NodeKind.WHOLE and mixing.is_of_vertices(name)
            if kind is NodeKind.ROWS or is_whole_row or isinstance(arg, tuple | list):
                source, target = _ends(arg)
                at_target = self.value(target, found) if isinstance(target, fx.Node) else target
                return self._at_sources(node, name, source, into, found), at_target
            if kind is None:
                return arg
            if kind is NodeKind.EDGES:
                return found.values[arg]
            return self._per_edge(self._as_is(arg, found), edges, rows)

        size = (len(into.sources), len(rows.vertices))
        return mixing.along(into.local, size=size, **{n: passed(n, a) for n, a in named.items()})

    def _history(self, node: fx.Node, name: str, like: Tensor, rows: ChunkRows) -> History:
        """The history of an argument of a message."""
        return self.around.history((rows.way, f"{self.name}/{node.name}", name), like)

    def _at_sources(self, node: fx.Node, name: str, arg: Any, into: ChunkEdges, found: Pass) -> Any:
        """An argument of a message at the sources of the edges."""
        if not isinstance(arg, fx.Node):
            return arg
        if self.kinds[arg] is NodeKind.WHOLE:
            value = self.whole[arg]
            return value.index_select(0, into.sources) if isinstance(value, Tensor) else value
        own, rows = found.values[arg], found.rows
        if not rows.is_alone:
            return exchanged(own, self._history(node, name, own, rows), rows, into)
        if self.around.fills:
            self._history(node, name, own, rows).take(rows, own)
        return own.index_select(0, into.own_rows)

    def read_by_messages(self) -> frozenset[fx.Node]:
        """What has to run for the rows of mirrors, too, in a layer: what messages read of sources.

        Raises:
            GraphTrainingError: there is something that cannot.
        """
        stack = [
            _ends(arg)[0]
            for node in self.nodes
            if isinstance(node.target, Mixing)
            for name, arg in node.kwargs.items()
            if name not in _NOT_PASSED
        ]
        found: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            is_row = isinstance(node, fx.Node) and self.kinds[node] is NodeKind.ROWS
            if not is_row or node in found:
                continue
            why = ""
            if isinstance(node.target, Mixing) or is_layer(node, self.module):
                why = "passes messages more than once"
            elif is_dropout(node, self.module):
                why = "drops features before it passes messages"
            if why:
                raise GraphTrainingError(
                    f"the layer {self.name} ({type(self.module).__name__}) {why}, which ways would "
                    "have to do together; use ways=1"
                )
            found.add(node)
            stack += node.all_input_nodes
        return frozenset(found)


def _ends(arg: Any) -> tuple[Any, Any]:
    """An argument of a message at sources and at targets."""
    return tuple(arg) if isinstance(arg, tuple | list) else (arg, arg)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A message-passing layer within a graph of nodes, opened."""

    inner: ChunkGraph
    nodes: list[fx.Node]
    inputs: Mapping[str, fx.Node]
    arguments: Arguments
    trace: Trace

    @classmethod
    def of(cls, node: fx.Node, outer: ChunkGraph) -> _Layer:
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
        nodes = [found for found in trace.graph.nodes if found.op != "output"]
        inner = ChunkGraph(
            f"{outer.name}{node.name}",
            module,
            nodes,
            {name: outer.whole[given[name]] for name in small},
            outer.around,
            frozenset(name for name, kind in kinds.items() if kind is NodeKind.WEIGHTS),
            small if outer.has_example else None,
        )
        if outer.around.chunks.num_ways > 1:
            inner.wide = inner.read_by_messages()
        inputs = {str(found.target): found for found in nodes if found.op == "placeholder"}
        return cls(inner, inner.needed({n.name for n in nodes}), inputs, arguments, trace)

    def read_along_edges(self, node: fx.Node) -> set[fx.Node]:
        """What the layer that a node calls reads of the sources of messages."""
        given = dict(_named(self.arguments, node))
        return {given[name] for name, place in self.inputs.items() if place in self.inner.wide}

    def run(self, node: fx.Node, around: Pass, outer: ChunkGraph) -> Any:
        """What the layer returns for the rows of a chunk."""

        def met(arg: fx.Node) -> Any:
            if outer.kinds[arg] is NodeKind.WHOLE:
                return outer.whole[arg]
            return around.wide[arg] if arg in around.wide else outer.value(arg, around)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), met)
        tensors, given = self.arguments.tensors(args, kwargs), dict(_named(self.arguments, node))
        inner, found = self.inner, Pass(around.rows)
        for name, place in self.inputs.items():
            if inner.kinds[place] is not NodeKind.WHOLE:
                is_wide = given[name] in around.wide and place not in inner.wide
                value = tensors[name]
                found.values[place] = found.rows.narrow(value) if is_wide else value
        inner.run(self.nodes, found)
        leaves = [
            inner.value(leaf, found) if isinstance(leaf, fx.Node) else leaf
            for leaf in self.trace.outputs
        ]
        return self.trace.output.unflatten(leaves)


def _named(arguments: Arguments, node: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    """The arguments of a layer's forward by name, and the nodes that stand for them."""
    leaves = arguments.flat(node.args, node.kwargs)[0]
    for name, leaf in zip(arguments.names, leaves, strict=True):
        if name is not None:
            yield name, leaf
