"""The nodes of a forward, run on the vertices of one chunk.

What reads no other vertices runs on the rows of the chunk; layers are opened, and the sources of
the messages into a chunk come from its own vertices, from mirrors, and from those of other chunks
out of histories.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from torch import Tensor, fx

from lightning_gpp.capture.tracing.trace import guard
from lightning_gpp.gnn.chunks import ChunkEdges, ChunkRows, EdgeSet
from lightning_gpp.gnn.errors import GraphTrainingError
from lightning_gpp.gnn.graph_values import GraphValues, NodeKind, Pass
from lightning_gpp.gnn.history import History, exchanged
from lightning_gpp.gnn.message_passing import Mixing, is_dropout

_NOT_PASSED = frozenset({"size", "edge_index"})


class ChunkGraph(GraphValues):
    """The nodes of a forward, run for chunks; arguments as :class:`GraphValues` has them.

    Attributes:
        node: by its name.
        exchanged: what messages read of sources that is made outside of their layer: (messages,
            value). All between runs for the rows of mirrors, too.

    Raises:
        GraphTrainingError: there are several ways, and something that cannot run for mirrors.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.node = {node.name: node for node in self.nodes}
        self.exchanged: set[tuple[fx.Node, fx.Node]] = set()
        if self.around.chunks.num_ways > 1:
            self.wide = frozenset(self._read_by_messages())

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
        for node in nodes:
            if isinstance(node.target, Mixing):
                value = self._messages(node, node.target, found)
            else:
                value = self._run(node, partial(self._met, node=node, found=found))
            found.values[node] = value
        return found

    # Values as a chunk sees them -------------------------------------------------------------

    def _met(self, arg: fx.Node, node: fx.Node, found: Pass) -> Any:
        """An argument as a node meets it."""
        kind, given = self.kinds[node], self.kinds[arg]
        if kind is NodeKind.WEIGHTS:
            return self._as_is(arg, found)
        if kind is NodeKind.EDGES and given in (NodeKind.WHOLE, NodeKind.WEIGHTS):
            return self._per_edge(arg, self.edge_set(node), found)
        return self.value(arg, found, wide=node in self.wide)

    def _as_is(self, arg: fx.Node, found: Pass) -> Any:
        """A value that is not cut."""
        return found.values[arg] if arg in found.values else self.whole_value(arg)

    def _per_edge(self, arg: fx.Node, edges: EdgeSet, found: Pass) -> Any:
        """A value with a row per edge of the graph, for the edges into a chunk."""
        value = self._as_is(arg, found)
        if found.rows.is_everything or not isinstance(value, Tensor):
            return value
        if value.shape[:1] != (edges.edges.tensor.shape[1],):
            return value
        if (arg, edges) not in found.cut:
            found.cut[arg, edges] = value.index_select(0, edges.of(found.rows).edges)
        return found.cut[arg, edges]

    # Messages --------------------------------------------------------------------------------

    def _messages(self, node: fx.Node, mixing: Mixing, found: Pass) -> Any:
        """Passes messages into the rows of a chunk; histories take what it has."""
        rows, edges = found.rows, self.edge_set(node)
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
            return self._per_edge(arg, edges, found)

        size = (len(into.sources), len(rows.vertices))
        return mixing.along(into.local, size=size, **{n: passed(n, a) for n, a in named.items()})

    def _history(self, node: fx.Node, name: str, like: Tensor, rows: ChunkRows) -> History:
        """The history of an argument of a message."""
        return self.around.history((rows.way, node.name, name), like)

    def _at_sources(self, node: fx.Node, name: str, arg: Any, into: ChunkEdges, found: Pass) -> Any:
        """An argument of a message at the sources of the edges."""
        if not isinstance(arg, fx.Node):
            return arg
        if self.kinds[arg] is NodeKind.WHOLE and arg not in found.values:
            value = self.whole_value(arg)
            return value.index_select(0, into.sources) if isinstance(value, Tensor) else value
        own, rows = found.wide.get(arg, found.values[arg]), found.rows
        if not rows.is_alone:
            return exchanged(own, self._history(node, name, own, rows), rows, into)
        if self.around.fills:
            self._history(node, name, own, rows).take(rows, own)
        return own.index_select(0, into.own_rows)

    def _read_by_messages(self) -> set[fx.Node]:
        """What messages read of sources, as far as their layer computes it."""
        found: set[fx.Node] = set()
        for messages in self.nodes:
            if not isinstance(messages.target, Mixing):
                continue
            given = [arg for name, arg in messages.kwargs.items() if name not in _NOT_PASSED]
            stack = [_ends(arg)[0] for arg in given]
            while stack:
                node = stack.pop()
                if not isinstance(node, fx.Node) or self.kinds[node] is not NodeKind.ROWS:
                    continue
                if node.op == "placeholder" or node.meta["layer"] != messages.meta["layer"]:
                    self.exchanged.add((messages, node))
                    continue
                why = ""
                if isinstance(node.target, Mixing):
                    why = "passes messages more than once"
                elif is_dropout(node, self.module):
                    why = "drops features before it passes messages"
                if why:
                    raise GraphTrainingError(
                        f"{messages.target.named(messages)} {why}, which ways would have to do "
                        "together; use ways=1"
                    )
                if node not in found:
                    found.add(node)
                    stack += node.all_input_nodes
        return found


def _ends(arg: Any) -> tuple[Any, Any]:
    """An argument of a message at sources and at targets."""
    return tuple(arg) if isinstance(arg, tuple | list) else (arg, arg)
