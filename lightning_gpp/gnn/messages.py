"""Messages into one chunk: from its own vertices, mirrors, and other chunks out of histories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx

from lightning_gpp.gnn.chunk_values import ChunkValues
from lightning_gpp.gnn.chunks import ChunkEdges, ChunkRows, EdgeSet
from lightning_gpp.gnn.errors import GraphTrainingError
from lightning_gpp.gnn.graph_values import GraphValues
from lightning_gpp.gnn.history import History, exchanged
from lightning_gpp.gnn.message_passing import Mixing, is_dropout, is_layer
from lightning_gpp.gnn.node_kinds import NodeKind, Pass

_NOT_PASSED = frozenset({"size", "edge_index"})


def messages(node: fx.Node, values: ChunkValues, found: Pass) -> Any:
    """Passes messages into the rows of a chunk.

    Args:
        node: that passes them.
        values: of its forward.
        found: what is known; the histories that it reads take what the chunk has.
    """
    graph, rows, mixing = values.graph, found.rows, node.target
    assert isinstance(mixing, Mixing)
    named = {name: arg for name, arg in node.kwargs.items() if name not in _NOT_PASSED}
    edges = graph.edge_sets[node]
    if rows.is_everything:
        whole = fx.node.map_arg(named, partial(values.as_is, found=found))
        if graph.around.fills:
            _fill(graph, node, whole, rows)
        return mixing.along(edges.edge_index, **whole)
    into = edges.of(rows)
    ends = _Ends(values, node, mixing, edges, into, found)
    size = (len(into.sources), len(rows.vertices))
    passed = {name: ends.of(name, arg) for name, arg in named.items()}
    return mixing.along(into.local, size=size, **passed)


def _fill(graph: GraphValues, node: fx.Node, given: Mapping[str, Any], rows: ChunkRows) -> None:
    """Writes what a pass over all vertices reads into the histories."""
    for name, value in given.items():
        arg = node.kwargs[name]
        if isinstance(arg, tuple | list):
            arg, value = arg[0], value[0]
        if isinstance(arg, fx.Node) and graph.kinds[arg] is NodeKind.ROWS:
            _history(graph, node, name, value, rows).take(rows, value)


def _history(
    graph: GraphValues, node: fx.Node, name: str, like: Tensor, rows: ChunkRows
) -> History:
    """The history of an argument of a message."""
    return graph.around.history((rows.way, f"{graph.name}/{node.name}", name), like)


@dataclass(frozen=True, slots=True)
class _Ends:
    """Arguments of a message as the edges into one chunk see them."""

    values: ChunkValues
    node: fx.Node
    mixing: Mixing
    edges: EdgeSet
    into: ChunkEdges
    found: Pass

    def of(self, name: str, arg: Any) -> Any:
        """An argument by its name."""
        if isinstance(arg, tuple | list) and len(arg) == 2:
            return self._pair(name, *arg)
        if not isinstance(arg, fx.Node):
            return arg
        kind = self.values.graph.kinds[arg]
        is_rows = kind is NodeKind.ROWS or (
            kind is NodeKind.WHOLE and self.mixing.is_of_vertices(name)
        )
        if is_rows:
            return self._pair(name, arg, arg)
        if kind is NodeKind.EDGES:
            return self.found.values[arg]
        value = self.values.as_is(arg, self.found)
        return self.values.per_edge(value, self.edges, self.found.rows)

    def _pair(self, name: str, source: Any, target: Any) -> Any:
        """Rows at the sources of the edges, and at their targets."""
        return self._source(name, source), self._target(target)

    def _source(self, name: str, arg: Any) -> Any:
        if not isinstance(arg, fx.Node):
            return arg
        graph, rows = self.values.graph, self.found.rows
        if graph.kinds[arg] is NodeKind.WHOLE:
            value = graph.whole[arg]
            return value.index_select(0, self.into.sources) if isinstance(value, Tensor) else value
        own = self.found.values[arg]
        if rows.is_alone:
            if graph.around.fills:
                _history(graph, self.node, name, own, rows).take(rows, own)
            return own.index_select(0, self.into.own_rows)
        history = _history(graph, self.node, name, own, rows)
        return exchanged(own, history, rows, self.into)

    def _target(self, arg: Any) -> Any:
        return self.values.value(arg, self.found) if isinstance(arg, fx.Node) else arg


def read_by_messages(graph: GraphValues) -> frozenset[fx.Node]:
    """What has to run for the rows of mirrors, too, in a layer: what messages read of sources.

    Raises:
        GraphTrainingError: there is something that cannot.
    """
    mixing = [node for node in graph.nodes if isinstance(node.target, Mixing)]
    stack = [arg for node in mixing for arg in _sources(node)]
    found: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in found or graph.kinds[node] is not NodeKind.ROWS:
            continue
        if isinstance(node.target, Mixing) or is_layer(node, graph.module):
            raise _not_in_ways(graph, "passes messages more than once")
        if is_dropout(node, graph.module):
            raise _not_in_ways(graph, "drops features before it passes messages")
        found.add(node)
        stack += node.all_input_nodes
    return frozenset(found)


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """What is read of the sources of messages."""
    for name, arg in node.kwargs.items():
        source = arg[0] if isinstance(arg, tuple | list) and len(arg) == 2 else arg
        if name not in _NOT_PASSED and isinstance(source, fx.Node):
            yield source


def _not_in_ways(graph: GraphValues, why: str) -> GraphTrainingError:
    return GraphTrainingError(
        f"the layer {graph.name} ({type(graph.module).__name__}) {why}, which ways would have to "
        "do together; use ways=1"
    )
