"""Values of a forward as one chunk of the vertices sees them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lightning_gpp.gnn.chunks import ChunkRows, EdgeSet
from lightning_gpp.gnn.graph_values import GraphValues
from lightning_gpp.gnn.node_kinds import NodeKind, Pass


class ChunkValues:
    """Cuts what is known of a graph as a whole, and finds what a pass over a chunk has made.

    Args:
        graph: the nodes, and the values that are the same for all chunks.
        wide: nodes whose values have the rows of mirrors, too.
    """

    def __init__(self, graph: GraphValues, wide: frozenset[fx.Node]) -> None:
        self.graph, self.wide = graph, wide
        self._cut: dict[tuple[int, int, int | None, int], Tensor] = {}

    def clear(self) -> None:
        """What the values were cut from has changed."""
        self._cut.clear()

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
            return value if wide or node not in self.wide else narrow(value, found.rows)
        if (node, wide) not in found.cut:
            found.cut[node, wide] = self._per_row(node, found.rows, wide=wide)
        return found.cut[node, wide]

    def met(self, arg: fx.Node, node: fx.Node, found: Pass) -> Any:
        """An argument as a node meets it."""
        kinds = self.graph.kinds
        if kinds[node] is NodeKind.WEIGHTS:
            return self.as_is(arg, found)
        if kinds[node] is NodeKind.EDGES and kinds[arg] in (NodeKind.WHOLE, NodeKind.WEIGHTS):
            edges = self.graph.edge_sets[node]
            return self.per_edge(self.as_is(arg, found), edges, found.rows)
        return self.value(arg, found, wide=node in self.wide)

    def as_is(self, arg: fx.Node, found: Pass) -> Any:
        """A value that is not cut."""
        return found.values[arg] if arg in found.values else self.graph.whole_value(arg)

    def per_edge(self, value: Any, edges: EdgeSet, rows: ChunkRows) -> Any:
        """A value with a row per edge of the graph, for the edges into a chunk."""
        if rows.is_everything or not isinstance(value, Tensor):
            return value
        if value.shape[:1] != (edges.edge_index.shape[1],):
            return value
        chosen = edges.of(rows).edges
        if value.requires_grad:
            return value.index_select(0, chosen)
        key = (id(value), id(edges), rows.chunk, rows.way)
        if key not in self._cut:
            self._cut[key] = value.index_select(0, chosen)
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


def narrow(value: Any, rows: ChunkRows) -> Any:
    """Of extended rows those of the part."""
    return pytree.tree_map(
        lambda leaf: rows.narrow(leaf) if isinstance(leaf, Tensor) else leaf, value
    )
