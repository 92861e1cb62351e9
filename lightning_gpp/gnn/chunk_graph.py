"""A traced forward that runs on one chunk of vertices at a time.

Every node is of a kind:

===========  ===========================================================================
``WHOLE``    depends on the graph and on constants alone; computed once, for all vertices
``SIZE``     a number out of shapes: of all vertices where a whole value is computed from it,
             of the chunk's where a value of the chunk is
``WEIGHTS``  depends on parameters, but has no row per vertex
``ROWS``     a row per vertex: of the chunk's
``EDGES``    a row per edge: of those into the chunk
===========  ===========================================================================

A value that is whole is cut where one of the chunk meets it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from lightning_gpp.capture.operators.normalize import observation
from lightning_gpp.capture.operators.observe import run_node
from lightning_gpp.capture.tracing.trace import guard
from lightning_gpp.gnn.chunks import ChunkEdges, EdgeSet, EdgeSets, Rows
from lightning_gpp.gnn.errors import GraphTrainingError
from lightning_gpp.gnn.history import History, Techniques, exchanged
from lightning_gpp.gnn.message_passing import Mixing, OpenedLayer, is_layer, open_layer


class Way(Enum):
    """How the value of a node goes with the vertices; see the module's docstring."""

    WHOLE = "whole"
    SIZE = "size"
    WEIGHTS = "weights"
    ROWS = "rows"
    EDGES = "edges"


@dataclass
class Surroundings:
    """What all parts of a model that runs in chunks share.

    Attributes:
        num_vertices: of the graph.
        edge_sets: lists of edges that messages are passed on.
        techniques: how histories are used.
        histories: by the node that reads them and the argument.
        epoch: training passes that have begun, less one.
        fills: whether a pass over all vertices writes the histories.
    """

    num_vertices: int
    edge_sets: EdgeSets
    techniques: Techniques
    histories: dict[tuple[str, str], History] = field(default_factory=dict)
    epoch: int = -1
    fills: bool = False

    def begin_epoch(self) -> None:
        """A training pass begins."""
        self.epoch += 1
        for history in self.histories.values():
            history.begin_epoch(self.epoch)

    def history(self, key: tuple[str, str], like: Tensor) -> History:
        """The history of a value; made when it is first asked for."""
        if key not in self.histories:
            shape = (self.num_vertices, *like.shape[1:])
            self.histories[key] = History.zeros(self.techniques, shape, like.detach())
        return self.histories[key]


class ChunkGraph:
    """The nodes of a forward, and what is known of them.

    Args:
        name: of the module, for errors; empty for the captured one.
        module: whose forward it is.
        nodes: in the order in which they run, the output left out.
        whole: the arguments that are the same for all chunks, by name; the others have a row per
            vertex.
        around: what it shares with others.
        weights: names of arguments that depend on parameters and have no row per vertex.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        nodes: Sequence[fx.Node],
        whole: Mapping[str, Tensor],
        around: Surroundings,
        weights: frozenset[str] = frozenset(),
    ) -> None:
        self.name, self.module, self.nodes, self.around = name, module, nodes, around
        self.arguments = dict(whole)
        self.node = {node.name: node for node in nodes}
        self._weights = weights
        self.ways: dict[fx.Node, Way] = {}
        self.whole: dict[fx.Node, Any] = {}
        self._edge_sets: dict[fx.Node, EdgeSet] = {}
        self._layers: dict[fx.Node, _Layer] = {}
        self._cut: dict[tuple[int, int, int], Tensor] = {}
        self._compute()

    # The graph as a whole --------------------------------------------------------------------

    def update(self, whole: Mapping[str, Tensor]) -> None:
        """Takes the arguments that are the same for all chunks; computes what they changed."""
        is_same = all(_is_same(self.arguments.get(name), new) for name, new in whole.items())
        self.arguments.update(whole)
        if not is_same:
            self._compute()

    def _compute(self) -> None:
        self.whole.clear()
        self._cut.clear()
        self._layers.clear()
        with torch.no_grad():
            for node in self.nodes:
                self.ways[node] = self._way(node)

    def _way(self, node: fx.Node) -> Way:
        seen = observation(node)
        reads = {self.ways[arg] for arg in node.all_input_nodes}
        if node.op == "placeholder":
            if str(node.target) in self._weights:
                return Way.WEIGHTS
            if str(node.target) not in self.arguments:
                return Way.ROWS
            self.whole[node] = self.arguments[str(node.target)]
            return Way.WHOLE
        if node.op == "get_attr":
            return Way.WEIGHTS
        if isinstance(node.target, Mixing):
            self._edge_sets[node] = self._edge_set(node)
            return Way.ROWS if node.target.method == "propagate" else Way.EDGES
        if is_layer(node, self.module):
            return Way.ROWS
        if not seen.has_tensors:
            return self._way_of_plain(node, reads)
        if Way.ROWS in reads:
            return Way.ROWS
        if Way.EDGES in reads:
            self._edge_sets[node] = next(
                self._edge_sets[arg] for arg in node.all_input_nodes if self.ways[arg] is Way.EDGES
            )
            return Way.EDGES
        has_rows = all(shape[:1] == (self.around.num_vertices,) for shape in seen.shapes)
        if Way.WEIGHTS in reads or self._has_tensors(node):
            return Way.ROWS if has_rows else Way.WEIGHTS
        if has_rows and Way.WHOLE not in reads:  # made by its size
            return Way.ROWS
        return self._evaluated(node, has_rows)

    def _way_of_plain(self, node: fx.Node, reads: set[Way]) -> Way:
        if reads <= {Way.WHOLE, Way.SIZE} and Way.SIZE not in reads:
            return self._evaluated(node, has_rows=False)
        return Way.SIZE

    def _evaluated(self, node: fx.Node, has_rows: bool) -> Way:
        """Computes a whole value, unless it is random and every vertex can draw its own."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._whole_value)
        before = torch.random.get_rng_state()
        value = run_node(node, self.module, args, kwargs, self.arguments)
        if not torch.equal(before, torch.random.get_rng_state()):
            if has_rows:
                return Way.ROWS
            raise GraphTrainingError(
                f"{node.meta['location']} draws random numbers for the graph as a whole, which "
                "stages on several devices would draw differently: make the graph before forward "
                "is called and pass it as an argument"
            )
        self.whole[node] = value
        return Way.WHOLE

    def _whole_value(self, node: fx.Node) -> Any:
        return self.whole[node] if node in self.whole else observation(node).value

    def _has_tensors(self, node: fx.Node) -> bool:
        if node.op != "call_module":
            return False
        called = self.module.get_submodule(str(node.target))
        return next(called.parameters(), None) is not None or bool(list(called.buffers()))

    def _edge_set(self, node: fx.Node) -> EdgeSet:
        edges, mixing = _edges_of(node), node.target
        assert isinstance(mixing, Mixing)
        value = self.whole.get(edges) if isinstance(edges, fx.Node) else edges
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            what = "are computed from features" if value is None else "are a sparse matrix"
            raise GraphTrainingError(
                f"the edges of the layer {self.name} ({type(mixing.layer).__name__}) {what}; "
                "training in chunks takes an edge_index of shape (2, edges) that is an argument of "
                "forward or made of arguments alone"
            )
        return self.around.edge_sets.find(mixing.sources_first(value))

    # One chunk -------------------------------------------------------------------------------

    def needed(self, members: Collection[str]) -> list[fx.Node]:
        """The nodes that have to run for each chunk, of those with some names."""
        per_chunk = (Way.ROWS, Way.EDGES, Way.WEIGHTS)
        return [
            node
            for node in self.nodes
            if node.name in members and self.ways[node] in per_chunk and node.target is not guard
        ]

    def run(
        self, nodes: Sequence[fx.Node], values: dict[fx.Node, Any], rows: Rows
    ) -> dict[fx.Node, Any]:
        """Runs nodes on the vertices of a chunk.

        Args:
            nodes: of :meth:`needed`, in order.
            values: what is known of the chunk; gets the results.
            rows: of the chunk.
        """
        for node in nodes:
            if node in values:
                continue
            if isinstance(node.target, Mixing):
                values[node] = self._mixed(node, node.target, values, rows)
            elif is_layer(node, self.module) and (rows.chunk is not None or self.around.fills):
                values[node] = self._layer(node).run(node, values, rows, self)
            else:
                met = partial(self._met, node=node, values=values, rows=rows)
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), met)
                values[node] = run_node(node, self.module, args, kwargs, {})
        return values

    def value(self, node: fx.Node, values: Mapping[fx.Node, Any], rows: Rows) -> Any:
        """A value as the rows of a chunk see it, whole ones cut."""
        way = self.ways[node]
        if way is Way.SIZE:
            return self._size(node, values, rows)
        if way is not Way.WHOLE:
            return values[node]
        return self._per_row(self.whole[node], rows)

    def _met(self, arg: fx.Node, node: fx.Node, values: Mapping[fx.Node, Any], rows: Rows) -> Any:
        """An argument as a node meets it."""
        way = self.ways[node]
        if way is Way.WEIGHTS:
            return values[arg] if arg in values else self._whole_value(arg)
        if way is Way.EDGES and self.ways[arg] in (Way.WHOLE, Way.WEIGHTS):
            found = self.whole[arg] if arg in self.whole else values[arg]
            return self._per_edge(found, self._edge_sets[node], rows)
        return self.value(arg, values, rows)

    def _per_row(self, value: Any, rows: Rows) -> Any:
        def cut(leaf: Any) -> Any:
            is_rows = isinstance(leaf, Tensor) and leaf.shape[:1] == (self.around.num_vertices,)
            return rows.of(leaf) if is_rows else leaf

        return pytree.tree_map(cut, value)

    def _per_edge(self, value: Any, edges: EdgeSet, rows: Rows) -> Any:
        if rows.chunk is None or not isinstance(value, Tensor):
            return value
        if value.shape[:1] != (edges.edge_index.shape[1],):
            return value
        chosen = edges.of(rows.chunk).edges
        if value.requires_grad:
            return value.index_select(0, chosen)
        key = (id(value), id(edges), rows.chunk)
        if key not in self._cut:
            self._cut[key] = value.index_select(0, chosen)
        return self._cut[key]

    def _size(self, node: fx.Node, values: Mapping[fx.Node, Any], rows: Rows) -> Any:
        """A number out of shapes, as the rows of a chunk have it."""

        def shaped(arg: fx.Node) -> Any:
            if arg in values:
                return values[arg]
            if self.ways[arg] is Way.SIZE:
                return self._size(arg, values, rows)
            if self.ways[arg] is Way.WHOLE:
                return self._per_row(self.whole[arg], rows)
            return self._shape_of(arg, rows)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), shaped)
        return run_node(node, self.module, args, kwargs, {})

    def _shape_of(self, node: fx.Node, rows: Rows) -> Tensor:
        seen = observation(node)
        shape = list(seen.shapes[0])
        if shape[:1] == [self.around.num_vertices]:
            shape[0] = len(rows.vertices)
        return torch.empty(shape, dtype=seen.dtypes[0], device="meta")

    # Messages --------------------------------------------------------------------------------

    def _mixed(
        self, node: fx.Node, mixing: Mixing, values: Mapping[fx.Node, Any], rows: Rows
    ) -> Any:
        """Passes messages into the rows of a chunk."""
        named = {name: arg for name, arg in node.kwargs.items() if name not in _NOT_PASSED}
        edges = self._edge_sets[node]
        if rows.chunk is None:
            found = {name: self._as_is(arg, values) for name, arg in named.items()}
            self._fill(node, found)
            return mixing.along(edges.edge_index, **found)
        into = edges.of(rows.chunk)
        ends = _Ends(self, node, mixing, edges, into, rows, values)
        found = {name: ends.of(name, arg) for name, arg in named.items()}
        size = (len(into.sources), len(rows.vertices))
        return mixing.along(into.local, size=size, **found)

    def _as_is(self, arg: Any, values: Mapping[fx.Node, Any]) -> Any:
        return fx.node.map_arg(
            arg, lambda found: values[found] if found in values else self._whole_value(found)
        )

    def _fill(self, node: fx.Node, found: Mapping[str, Any]) -> None:
        """Writes what a pass over all vertices reads into the histories."""
        if not self.around.fills:
            return
        for name, value in found.items():
            arg = node.kwargs[name]
            if isinstance(arg, tuple | list):
                arg, value = arg[0], value[0]
            if isinstance(arg, fx.Node) and self.ways[arg] is Way.ROWS:
                history = self.around.history(self.key(node, name), value)
                history.values.copy_(value.detach())

    def key(self, node: fx.Node, name: str) -> tuple[str, str]:
        """By which the history of an argument is known."""
        return f"{self.name}/{node.name}", name

    def _layer(self, node: fx.Node) -> _Layer:
        if node not in self._layers:
            self._layers[node] = _Layer.of(node, self)
        return self._layers[node]

    def open_layers(self, nodes: Iterable[fx.Node]) -> None:
        """Opens the layers among some nodes, which the first chunk would do otherwise."""
        for node in nodes:
            if is_layer(node, self.module):
                self._layer(node)

    def example(self, node: fx.Node) -> Any:
        """A value as large as that of all vertices."""
        if node in self.whole or self.ways[node] is Way.SIZE:
            return self._whole_value(node)
        if self.ways[node] is Way.WEIGHTS and node.op == "get_attr":
            return run_node(node, self.module, (), {}, {})
        seen = observation(node)
        return torch.zeros(seen.shapes[0], dtype=seen.dtypes[0])


_NOT_PASSED = frozenset({"size", "edge_index"})


@dataclass(frozen=True, slots=True)
class _Ends:
    """Arguments of a message as the edges into one chunk see them."""

    graph: ChunkGraph
    node: fx.Node
    mixing: Mixing
    edges: EdgeSet
    into: ChunkEdges
    rows: Rows
    values: Mapping[fx.Node, Any]

    def of(self, name: str, arg: Any) -> Any:
        """An argument by its name."""
        if isinstance(arg, tuple | list) and len(arg) == 2:
            return self._pair(name, *arg)
        if not isinstance(arg, fx.Node):
            return arg
        way = self.graph.ways[arg]
        is_rows = way is Way.ROWS or (way is Way.WHOLE and self.mixing.is_of_vertices(name))
        if is_rows:
            return self._pair(name, arg, arg)
        if way is Way.EDGES:
            return self.values[arg]
        value = self.values[arg] if arg in self.values else self.graph._whole_value(arg)
        return self.graph._per_edge(value, self.edges, self.rows)

    def _pair(self, name: str, source: Any, target: Any) -> Any:
        """Rows at the sources of the edges, and at their targets."""
        return self._source(name, source), self._target(target)

    def _source(self, name: str, arg: Any) -> Any:
        if not isinstance(arg, fx.Node):
            return arg
        if self.graph.ways[arg] is Way.WHOLE:
            value = self.graph.whole[arg]
            return value.index_select(0, self.into.sources) if isinstance(value, Tensor) else value
        own = self.values[arg]
        history = self.graph.around.history(self.graph.key(self.node, name), own)
        return exchanged(own, history, self.rows, self.into)

    def _target(self, arg: Any) -> Any:
        if not isinstance(arg, fx.Node):
            return arg
        return self.graph.value(arg, self.values, self.rows)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A message-passing layer within a graph of nodes."""

    inner: ChunkGraph
    nodes: list[fx.Node]
    inputs: Mapping[str, fx.Node]
    outputs: tuple[Any, ...]
    arguments: Any

    @classmethod
    def of(cls, node: fx.Node, outer: ChunkGraph) -> _Layer:
        """Opens the layer that a node calls."""
        module = outer.module.get_submodule(str(node.target))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), outer.example)
        name = str(node.target) or type(module).__name__
        opened = open_layer(module, args, kwargs, name)
        tensors = opened.arguments.tensors(args, kwargs)
        given = dict(_tensors_by_name(opened, node))
        whole = {
            name: tensor for name, tensor in tensors.items() if outer.ways[given[name]] is Way.WHOLE
        }
        nodes = [found for found in opened.trace.graph.nodes if found.op != "output"]
        weights = frozenset(name for name, arg in given.items() if outer.ways[arg] is Way.WEIGHTS)
        path = f"{outer.name}{node.name}"
        inner = ChunkGraph(path, module, nodes, whole, outer.around, weights)
        inputs = {str(found.target): found for found in nodes if found.op == "placeholder"}
        needed = inner.needed({found.name for found in nodes})
        return cls(inner, needed, inputs, opened.trace.outputs, opened)

    def run(
        self, node: fx.Node, values: Mapping[fx.Node, Any], rows: Rows, outer: ChunkGraph
    ) -> Any:
        """What the layer returns for the rows of a chunk."""
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs),
            lambda arg: (
                outer.whole[arg] if outer.ways[arg] is Way.WHOLE else outer.value(arg, values, rows)
            ),
        )
        given = self.arguments.arguments.tensors(args, kwargs)
        inner = {
            place: given[name]
            for name, place in self.inputs.items()
            if self.inner.ways[place] is not Way.WHOLE
        }
        found = self.inner.run(self.nodes, dict(inner), rows)
        leaves = [
            self.inner.value(leaf, found, rows) if isinstance(leaf, fx.Node) else leaf
            for leaf in self.outputs
        ]
        return self.arguments.trace.output.unflatten(leaves)


def _tensors_by_name(opened: OpenedLayer, node: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    """The arguments of a layer's forward by name, and the nodes that stand for them."""
    leaves = opened.arguments.leaves(node.args, node.kwargs)
    for name, leaf in zip(opened.arguments.names, leaves, strict=True):
        if name is not None:
            yield name, leaf


def _edges_of(node: fx.Node) -> Any:
    return node.args[0] if node.args else node.kwargs["edge_index"]


def _is_same(known: Tensor | None, tensor: Tensor) -> bool:
    if known is None:
        return False
    alike = known.shape == tensor.shape and known.dtype == tensor.dtype
    is_it = known.data_ptr() == tensor.data_ptr() and known._version == tensor._version
    return alike and (is_it or torch.equal(known, tensor))
