"""Runs the nodes of a forward on the vertices of one chunk.

What reads no other vertices runs on the rows of the chunk; layers are opened, and the sources of
the messages into a chunk come from its own vertices, from mirrors, and from those of other chunks
out of histories. Every node is of a kind:

===========  ===========================================================================
``WHOLE``    depends on the graph and on constants alone; computed once, for all vertices
``SIZE``     a number out of shapes: of all vertices where a whole value is computed from it,
             of the chunk's where a value of the chunk is
``WEIGHTS``  depends on parameters, but has no row per vertex
``ROWS``     a row per vertex: of the chunk's
``EDGES``    a row per edge: of those into the chunk
===========  ===========================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from lightning_gpp.capture.errors import GuardError
from lightning_gpp.capture.operators.observe import observation, run_node
from lightning_gpp.capture.operators.variation import tells_shape
from lightning_gpp.capture.tracing.trace import guard
from lightning_gpp.gnn.chunks import ChunkEdges, ChunkRows, EdgeSet, GraphTrainingError, Remembered
from lightning_gpp.gnn.history import History, Surroundings, exchanged
from lightning_gpp.gnn.message_passing import Mixing, is_dropout

_NOT_PASSED = frozenset({"size", "edge_index"})


class NodeKind(Enum):
    """How a node's value depends on the vertices; see the module's docstring."""

    WHOLE = "whole"
    SIZE = "size"
    WEIGHTS = "weights"
    ROWS = "rows"
    EDGES = "edges"


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of the nodes over some vertices.

    Attributes:
        rows: of the vertices.
        values: of the nodes that ran, and those that were given.
        wide: of some nodes, the extended rows: with those of mirrors.
    """

    rows: ChunkRows
    values: dict[fx.Node, Any] = field(default_factory=dict)
    wide: dict[fx.Node, Any] = field(default_factory=dict)


class ChunkGraph:
    """The nodes of a forward, their kinds, and their values for each chunk.

    Args:
        module: whose forward it is.
        nodes: in the order in which they run, the output left out.
        staying: names of the arguments that are the same for all chunks; the others have a row per
            vertex.
        arguments: the former that are at hand.
        around: what it shares with others.

    Attributes:
        device: that chunks run on.
        wide: nodes whose values have the rows of mirrors, too.
        exchanged: (messages, value): what they read of sources and is made outside of their layer;
            what is between runs for the rows of mirrors, too.

    Raises:
        GraphTrainingError: a draw for the whole graph, or with several ways what cannot run for
            mirrors.
    """

    def __init__(
        self,
        module: nn.Module,
        nodes: Sequence[fx.Node],
        staying: frozenset[str],
        arguments: Mapping[str, Tensor],
        around: Surroundings,
    ) -> None:
        self.module, self.nodes, self.around = module, nodes, around
        self.kinds: dict[fx.Node, NodeKind] = {}
        self.wide: frozenset[fx.Node] = frozenset()
        self.arguments = {name: Remembered(tensor) for name, tensor in arguments.items()}
        self._staying, self.device = staying, torch.device("cpu")
        self._whole: dict[fx.Node, Any] = {}
        self._edge_sets: dict[fx.Node, EdgeSet] = {}
        for node in nodes:
            self.kinds[node] = self._kind(node)
        self.node = {node.name: node for node in nodes}
        self.exchanged: set[tuple[fx.Node, fx.Node]] = set()
        if around.chunks.num_ways > 1:
            self.wide = frozenset(self._read_by_messages())

    def update(self, arguments: Mapping[str, Tensor], device: torch.device) -> None:
        """Takes arguments that are the same for all chunks, and the device that these run on."""
        is_known = all(self.arguments[name].is_that_of(new) for name, new in arguments.items())
        if not is_known or device != self.device:
            self.device = device
            self.arguments |= {name: Remembered(new) for name, new in arguments.items()}
            self._whole.clear()
            self._edge_sets.clear()
            self.check_guards()

    # Kinds -----------------------------------------------------------------------------------

    def _kind(self, node: fx.Node) -> NodeKind:
        seen, reads = observation(node), {self.kinds[arg] for arg in node.all_input_nodes}
        if node.op == "placeholder":
            return NodeKind.WHOLE if str(node.target) in self._staying else NodeKind.ROWS
        if node.op == "get_attr":
            return NodeKind.WEIGHTS
        if isinstance(node.target, Mixing):
            return NodeKind.ROWS if node.target.method == "propagate" else NodeKind.EDGES
        if not seen.has_tensors:
            is_number = not tells_shape(node) and reads <= {NodeKind.WHOLE}
            return NodeKind.WHOLE if is_number else NodeKind.SIZE
        for kind in (NodeKind.ROWS, NodeKind.EDGES):
            if kind in reads:
                return kind
        has_rows = all(shape[:1] == (self.around.num_example,) for shape in seen.shapes)
        if NodeKind.WEIGHTS in reads or self._has_tensors(node):
            return NodeKind.ROWS if has_rows else NodeKind.WEIGHTS
        if node.meta["draws"] and not has_rows:
            raise GraphTrainingError(
                f"{node.meta['location']} draws random numbers for the graph as a whole, which "
                "stages on several devices would draw differently: make the graph before forward "
                "is called and pass it as an argument"
            )
        return NodeKind.ROWS if node.meta["draws"] else NodeKind.WHOLE

    def _has_tensors(self, node: fx.Node) -> bool:
        if node.op != "call_module":
            return False
        called = self.module.get_submodule(str(node.target))
        return any(True for tensors in (called.parameters(), called.buffers()) for _ in tensors)

    def check_guards(self) -> None:
        """Checks that decisions by sizes are those that were made with another graph.

        Raises:
            GraphTrainingError: one is not.
        """
        for node in self.nodes:
            if node.target is guard and all(
                self.kinds[arg] is NodeKind.SIZE or self._is_at_hand(arg)
                for arg in node.all_input_nodes
            ):
                try:
                    self._run(node, self.whole_value)
                except GuardError as error:
                    raise GraphTrainingError(
                        f"{error.location} decides by the size of the graph, and decided otherwise "
                        "for the small graph that the model was captured with: make the decision "
                        "before forward is called, or give GNNPipeStrategy(mode='exact')"
                    ) from error

    # Values ----------------------------------------------------------------------------------

    def edge_set(self, node: fx.Node) -> EdgeSet:
        """The edges of a node that passes messages or has a row per edge."""
        if node not in self._edge_sets:
            if isinstance(node.target, Mixing):
                self._edge_sets[node] = self._edges_of(node, node.target)
            else:
                of_edges = (n for n in node.all_input_nodes if self.kinds[n] is NodeKind.EDGES)
                self._edge_sets[node] = self.edge_set(next(of_edges))
        return self._edge_sets[node]

    def _edges_of(self, node: fx.Node, mixing: Mixing) -> EdgeSet:
        value: Any = node.args[0] if node.args else node.kwargs["edge_index"]
        if isinstance(value, fx.Node):
            value = self.whole_value(value) if self.kinds[value] is NodeKind.WHOLE else None
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            what = "are computed from features" if value is None else "are a sparse matrix"
            raise GraphTrainingError(
                f"the edges of {mixing.named(node)} {what}; training in chunks takes an edge_index "
                "of shape (2, edges) that is an argument of forward or made of arguments alone"
            )
        has_sources_first = mixing.layer.flow == "source_to_target"
        return self.around.edge_set(value if has_sources_first else value.flip(0))

    def _is_at_hand(self, node: fx.Node) -> bool:
        """Whether a value is of the whole graph, and follows from the arguments at hand."""
        if node.op == "placeholder":
            return str(node.target) in self.arguments
        is_whole, read = self.kinds[node] is NodeKind.WHOLE, node.all_input_nodes
        if not is_whole and self.kinds[node] is not NodeKind.SIZE:
            return False
        return all(
            (is_whole and self.kinds[arg] is NodeKind.SIZE) or self._is_at_hand(arg) for arg in read
        )

    def whole_value(self, node: fx.Node) -> Any:
        """A value as the whole graph has it."""
        if node.op == "placeholder":
            return self.arguments[str(node.target)].tensor
        if node not in self._whole:
            if self.kinds[node] is NodeKind.SIZE and not self._is_at_hand(node):
                return self.size(node, Pass(self.around.everything), wide=False)
            with torch.no_grad():
                self._whole[node] = self._run(node, self.whole_value)
        return self._whole[node]

    def _run(self, node: fx.Node, given: Callable[[fx.Node], Any]) -> Any:
        """The result of a node; constants, which were on the CPU at capture, are on the device."""

        def at_hand(arg: Any) -> Any:
            if isinstance(arg, fx.Node):
                return given(arg)
            if isinstance(arg, torch.device):
                return self.device
            return arg.to(self.device) if isinstance(arg, Tensor) else arg

        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), at_hand)
        return run_node(node, self.module, {}, *args, **kwargs)

    def size(self, node: fx.Node, found: Pass, *, wide: bool) -> Any:
        """A number out of shapes, as the rows of a chunk (``wide``: and of mirrors) have it."""

        def shaped(arg: fx.Node) -> Any:
            if arg in found.values:
                return self.value(arg, found, wide=wide)
            if self.kinds[arg] is NodeKind.SIZE:
                return self.size(arg, found, wide=wide)
            seen, rows = observation(arg), found.rows
            if not seen.has_tensors:
                return self.whole_value(arg)
            shape = list(seen.shapes[0])
            if shape[:1] == [self.around.num_example]:
                shape[0] = len(rows.extended if wide else rows.vertices)
            return torch.empty(shape, dtype=seen.dtypes[0], device="meta")

        return self._run(node, shaped)

    def value(self, node: fx.Node, found: Pass, *, wide: bool = False) -> Any:
        """A value as the rows of a chunk (``wide``: and of mirrors) see it, whole ones cut."""
        kind = self.kinds[node]
        if kind is NodeKind.SIZE:
            return self.size(node, found, wide=wide)
        if wide and node in found.wide:
            return found.wide[node]
        if kind is not NodeKind.WHOLE or node in found.values:
            is_narrow = wide or node not in self.wide
            return found.values[node] if is_narrow else found.rows.narrow(found.values[node])

        def cut(leaf: Any) -> Any:
            has_rows = leaf.shape[:1] == (self.around.chunks.num_vertices,)
            return found.rows.of(leaf, wide=wide) if has_rows else leaf

        return pytree.tree_map_only(Tensor, cut, self.whole_value(node))

    # Runs ------------------------------------------------------------------------------------

    def needed(self, members: Collection[str]) -> list[fx.Node]:
        """The nodes that have to run for each chunk, of those with some names."""
        found = (node for node in self.nodes if node.name in members and node.op != "placeholder")
        ones = (NodeKind.WHOLE, NodeKind.SIZE)
        return [n for n in found if self.kinds[n] not in ones and n.target is not guard]

    def run(self, nodes: Sequence[fx.Node], found: Pass) -> Pass:
        """Runs nodes of :meth:`needed`, in order; ``found`` gets what they make."""
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
        return value.index_select(0, edges.of(found.rows).edges)

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
                        f"{messages.target.named(messages)} {why}, which does not work where "
                        "several devices share a layer; use ways=1"
                    )
                if node not in found:
                    found.add(node)
                    stack += node.all_input_nodes
        return found


def _ends(arg: Any) -> tuple[Any, Any]:
    """An argument of a message at sources and at targets."""
    return tuple(arg) if isinstance(arg, tuple | list) else (arg, arg)
