"""A traced forward that runs on one chunk of vertices at a time.

What a value is: :mod:`.node_kinds`. A value that is whole is cut where one of the chunk meets it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from lightning_gpp.capture.errors import GuardError
from lightning_gpp.capture.operators.normalize import observation
from lightning_gpp.capture.operators.observe import run_node
from lightning_gpp.capture.operators.variation import tells_shape
from lightning_gpp.capture.tracing.trace import guard
from lightning_gpp.gnn.chunks import ChunkEdges, ChunkRows, EdgeSet
from lightning_gpp.gnn.errors import GraphTrainingError
from lightning_gpp.gnn.history import History, exchanged
from lightning_gpp.gnn.message_passing import (
    Mixing,
    OpenedLayer,
    is_dropout,
    is_layer,
    open_layer,
)
from lightning_gpp.gnn.node_kinds import NodeKind, Pass, Surroundings


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
        small: those that are the same for all chunks as they were when it was traced, if that was
            with another graph.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        nodes: Sequence[fx.Node],
        whole: Mapping[str, Tensor],
        around: Surroundings,
        weights: frozenset[str] = frozenset(),
        small: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.name, self.module, self.nodes, self.around = name, module, nodes, around
        self.arguments = dict(whole)
        self._small_arguments = None if small is None else dict(small)
        self._small: dict[fx.Node, Any] = {}
        self.node = {node.name: node for node in nodes}
        self._weights = weights
        self.kinds: dict[fx.Node, NodeKind] = {}
        self.whole: dict[fx.Node, Any] = {}
        self._edge_sets: dict[fx.Node, EdgeSet] = {}
        self._layers: dict[fx.Node, _Layer] = {}
        self._cut: dict[tuple[int, int, int | None, int], Tensor] = {}
        self._changed: set[fx.Node] = set()
        self.wide: frozenset[fx.Node] = frozenset()
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
        self._small.clear()
        self._cut.clear()
        self._layers.clear()
        with torch.no_grad():
            for node in self.nodes:
                self.kinds[node] = self._kind(node)
        self._changed = self._changed_by_rows()
        if self._small_arguments is not None:
            self._check_guards()

    def _check_guards(self) -> None:
        """Checks that decisions by sizes are those that were made with the small graph.

        Raises:
            GraphTrainingError: one is not.
        """
        by_size = (NodeKind.WHOLE, NodeKind.SIZE)
        for node in self.nodes:
            read = [self.kinds[arg] for arg in node.all_input_nodes]
            if node.target is guard and all(kind in by_size for kind in read):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._whole_value)
                try:
                    run_node(node, self.module, args, kwargs, {})
                except GuardError as error:
                    raise GraphTrainingError(
                        f"{error.location} decides by the size of the graph, and otherwise for a "
                        "small graph, which the model is captured with: make the decision before "
                        "forward is called, or give GNNPipeStrategy(mode='exact')"
                    ) from error

    def _changed_by_rows(self) -> set[fx.Node]:
        """Whole values that nodes change in place which run for every chunk."""
        changed = frozenset().union(
            *(
                observation(node).changed
                for node, kind in self.kinds.items()
                if kind is not NodeKind.WHOLE
            )
        )
        return {node for node in self.whole if observation(node).touched & changed}

    def _kind(self, node: fx.Node) -> NodeKind:
        seen = observation(node)
        reads = {self.kinds[arg] for arg in node.all_input_nodes}
        if node.op == "placeholder":
            if str(node.target) in self._weights:
                return NodeKind.WEIGHTS
            if str(node.target) not in self.arguments:
                return NodeKind.ROWS
            self.whole[node] = self.arguments[str(node.target)]
            if self._small_arguments is not None:
                self._small[node] = self._small_arguments[str(node.target)]
            return NodeKind.WHOLE
        if node.op == "get_attr":
            return NodeKind.WEIGHTS
        if isinstance(node.target, Mixing):
            self._edge_sets[node] = self._edge_set(node)
            return NodeKind.ROWS if node.target.method == "propagate" else NodeKind.EDGES
        if is_layer(node, self.module):
            return NodeKind.ROWS
        if not seen.has_tensors:
            return self._kind_of_plain(node, reads)
        if NodeKind.ROWS in reads:
            return NodeKind.ROWS
        if NodeKind.EDGES in reads:
            self._edge_sets[node] = next(
                self._edge_sets[arg]
                for arg in node.all_input_nodes
                if self.kinds[arg] is NodeKind.EDGES
            )
            return NodeKind.EDGES
        has_rows = all(shape[:1] == (self.around.num_example,) for shape in seen.shapes)
        if NodeKind.WEIGHTS in reads or self._has_tensors(node):
            return NodeKind.ROWS if has_rows else NodeKind.WEIGHTS
        return self._evaluated(node, has_rows)

    def _kind_of_plain(self, node: fx.Node, reads: set[NodeKind]) -> NodeKind:
        """Numbers out of shapes are of the chunk, too; others are of the graph as a whole."""
        if node.target is not guard and all(arg in self.whole for arg in node.all_input_nodes):
            self._evaluated(node, has_rows=False)
        is_number = not tells_shape(node) and reads <= {NodeKind.WHOLE}
        return NodeKind.WHOLE if is_number else NodeKind.SIZE

    def _evaluated(self, node: fx.Node, has_rows: bool) -> NodeKind:
        """Computes a whole value, unless it is random and every vertex can draw its own."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._whole_value)
        before = torch.random.get_rng_state()
        value = run_node(node, self.module, args, kwargs, self.arguments)
        if not torch.equal(before, torch.random.get_rng_state()):
            if has_rows:
                return NodeKind.ROWS
            raise GraphTrainingError(
                f"{node.meta['location']} draws random numbers for the graph as a whole, which "
                "stages on several devices would draw differently: make the graph before forward "
                "is called and pass it as an argument"
            )
        self.whole[node] = value
        if self._small_arguments is not None:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._small_value)
            self._small[node] = run_node(node, self.module, args, kwargs, self._small_arguments)
        return NodeKind.WHOLE

    def _whole_value(self, node: fx.Node) -> Any:
        if node in self.whole:
            return self.whole[node]
        if self.kinds[node] is NodeKind.SIZE and self._small_arguments is not None:
            return self._size(node, Pass(self.around.everything, {}), wide=False)
        return observation(node).value

    def _small_value(self, node: fx.Node) -> Any:
        """A whole value of the graph that the model was traced with."""
        return self._small[node] if node in self._small else observation(node).value

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
                value = self._mixed(node, node.target, found)
            elif is_layer(node, self.module) and opens:
                value = self._layer(node).run(node, found, self)
            else:
                met = partial(self._met, node=node, found=found)
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), met)
                value = run_node(node, self.module, args, kwargs, {})
            found.values[node] = value
        return found

    def value(self, node: fx.Node, found: Pass, *, wide: bool = False) -> Any:
        """A value as the rows of a chunk see it, whole ones cut.

        Args:
            node: whose.
            found: what is known.
            wide: whether the rows of mirrors are asked for.
        """
        kind = self.kinds[node]
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
        kind = self.kinds[node]
        if kind is NodeKind.WEIGHTS:
            return self._as_is(arg, found)
        if kind is NodeKind.EDGES and self.kinds[arg] in (NodeKind.WHOLE, NodeKind.WEIGHTS):
            return self._per_edge(self._as_is(arg, found), self._edge_sets[node], found.rows)
        return self.value(arg, found, wide=node in self.wide)

    def _per_row(self, node: fx.Node, rows: ChunkRows, *, wide: bool) -> Any:
        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.shape[:1] != (self.around.num_vertices,):
                return leaf
            part = rows.of(leaf, wide=wide)
            return part.clone() if part is leaf and node in self._changed else part

        return pytree.tree_map(cut, self.whole[node])

    def _per_edge(self, value: Any, edges: EdgeSet, rows: ChunkRows) -> Any:
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

    def _size(self, node: fx.Node, found: Pass, *, wide: bool) -> Any:
        """A number out of shapes, as the rows of a chunk have it."""

        def shaped(arg: fx.Node) -> Any:
            if arg in found.values:
                return self.value(arg, found, wide=wide)
            if self.kinds[arg] is NodeKind.SIZE:
                return self._size(arg, found, wide=wide)
            if self.kinds[arg] is NodeKind.WHOLE and not isinstance(self.whole[arg], Tensor):
                return self.whole[arg]
            return self._shape_of(arg, found.rows, wide=wide)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), shaped)
        return run_node(node, self.module, args, kwargs, {})

    def _shape_of(self, node: fx.Node, rows: ChunkRows, *, wide: bool) -> Tensor:
        seen = observation(node)
        shape = list(seen.shapes[0])
        if shape[:1] == [self.around.num_example]:
            shape[0] = len(rows.extended if wide else rows.vertices)
        return torch.empty(shape, dtype=seen.dtypes[0], device="meta")

    # Messages --------------------------------------------------------------------------------

    def _mixed(self, node: fx.Node, mixing: Mixing, found: Pass) -> Any:
        """Passes messages into the rows of a chunk."""
        named = {name: arg for name, arg in node.kwargs.items() if name not in _NOT_PASSED}
        edges, rows = self._edge_sets[node], found.rows
        if rows.is_everything:
            whole = fx.node.map_arg(named, partial(self._as_is, found=found))
            self._fill(node, whole, rows)
            return mixing.along(edges.edge_index, **whole)
        into = edges.of(rows)
        ends = _Ends(self, node, mixing, edges, into, found)
        size = (len(into.sources), len(rows.vertices))
        passed = {name: ends.of(name, arg) for name, arg in named.items()}
        return mixing.along(into.local, size=size, **passed)

    def _as_is(self, arg: fx.Node, found: Pass) -> Any:
        """A value that is not cut."""
        return found.values[arg] if arg in found.values else self._whole_value(arg)

    def _fill(self, node: fx.Node, found: Mapping[str, Any], rows: ChunkRows) -> None:
        """Writes what a pass over all vertices reads into the histories."""
        if not self.around.fills:
            return
        for name, value in found.items():
            arg = node.kwargs[name]
            if isinstance(arg, tuple | list):
                arg, value = arg[0], value[0]
            if isinstance(arg, fx.Node) and self.kinds[arg] is NodeKind.ROWS:
                self.history(node, name, value, rows).take(rows, value)

    def history(self, node: fx.Node, name: str, like: Tensor, rows: ChunkRows) -> History:
        """The history of an argument of a message."""
        return self.around.history((rows.way, f"{self.name}/{node.name}", name), like)

    # Ways ------------------------------------------------------------------------------------

    def widen(self) -> None:
        """Finds what has to run for the rows of mirrors, too: what messages read of sources.

        Raises:
            GraphTrainingError: there is something that cannot.
        """
        mixing = [node for node in self.nodes if isinstance(node.target, Mixing)]
        stack = [arg for node in mixing for arg in self._sources(node)]
        found: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node in found or self.kinds[node] is not NodeKind.ROWS:
                continue
            if isinstance(node.target, Mixing) or is_layer(node, self.module):
                raise self._not_in_ways("passes messages more than once")
            if is_dropout(node, self.module):
                raise self._not_in_ways("drops features before it passes messages")
            found.add(node)
            stack += node.all_input_nodes
        self.wide = frozenset(found)

    def _sources(self, node: fx.Node) -> Iterator[fx.Node]:
        """What is read of the sources of messages."""
        for name, arg in node.kwargs.items():
            source = arg[0] if isinstance(arg, tuple | list) and len(arg) == 2 else arg
            if name not in _NOT_PASSED and isinstance(source, fx.Node):
                yield source

    def _not_in_ways(self, why: str) -> GraphTrainingError:
        return GraphTrainingError(
            f"the layer {self.name} ({type(self.module).__name__}) {why}, which ways would have to "
            "do together; use ways=1"
        )

    def read_along_edges(self, node: fx.Node) -> frozenset[fx.Node]:
        """What a layer reads of the sources of messages; it has to be opened."""
        return self._layer(node).wide(node)

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
        """A value as large as when the model was traced."""
        if node in self._small:
            return self._small[node]
        if self._small_arguments is None and node in self.whole:
            return self.whole[node]
        if self.kinds[node] is NodeKind.SIZE:
            return observation(node).value
        if self.kinds[node] is NodeKind.WEIGHTS and node.op == "get_attr":
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
    found: Pass

    def of(self, name: str, arg: Any) -> Any:
        """An argument by its name."""
        if isinstance(arg, tuple | list) and len(arg) == 2:
            return self._pair(name, *arg)
        if not isinstance(arg, fx.Node):
            return arg
        kind = self.graph.kinds[arg]
        is_rows = kind is NodeKind.ROWS or (
            kind is NodeKind.WHOLE and self.mixing.is_of_vertices(name)
        )
        if is_rows:
            return self._pair(name, arg, arg)
        if kind is NodeKind.EDGES:
            return self.found.values[arg]
        value = self.graph._as_is(arg, self.found)
        return self.graph._per_edge(value, self.edges, self.found.rows)

    def _pair(self, name: str, source: Any, target: Any) -> Any:
        """ChunkRows at the sources of the edges, and at their targets."""
        return self._source(name, source), self._target(target)

    def _source(self, name: str, arg: Any) -> Any:
        if not isinstance(arg, fx.Node):
            return arg
        if self.graph.kinds[arg] is NodeKind.WHOLE:
            value = self.graph.whole[arg]
            return value.index_select(0, self.into.sources) if isinstance(value, Tensor) else value
        own, rows, graph = self.found.values[arg], self.found.rows, self.graph
        if rows.is_alone:
            if graph.around.fills:
                graph.history(self.node, name, own, rows).take(rows, own)
            return own.index_select(0, self.into.own_rows)
        history = graph.history(self.node, name, own, rows)
        return exchanged(own, history, rows, self.into)

    def _target(self, arg: Any) -> Any:
        if not isinstance(arg, fx.Node):
            return arg
        return self.graph.value(arg, self.found)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A message-passing layer within a graph of nodes."""

    inner: ChunkGraph
    nodes: list[fx.Node]
    inputs: Mapping[str, fx.Node]
    opened: OpenedLayer

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
            name: tensor
            for name, tensor in tensors.items()
            if outer.kinds[given[name]] is NodeKind.WHOLE
        }
        small = None
        if outer._small_arguments is not None:
            small = {name: tensor for name, tensor in tensors.items() if name in whole}
            whole = {name: outer.whole[given[name]] for name in whole}
        nodes = [found for found in opened.trace.graph.nodes if found.op != "output"]
        weights = frozenset(
            name for name, arg in given.items() if outer.kinds[arg] is NodeKind.WEIGHTS
        )
        path = f"{outer.name}{node.name}"
        inner = ChunkGraph(path, module, nodes, whole, outer.around, weights, small)
        if outer.around.num_ways > 1:
            inner.widen()
        inputs = {str(found.target): found for found in nodes if found.op == "placeholder"}
        needed = inner.needed({found.name for found in nodes})
        return cls(inner, needed, inputs, opened)

    def wide(self, node: fx.Node) -> frozenset[fx.Node]:
        """The arguments of which the rows of mirrors are read."""
        given = dict(_tensors_by_name(self.opened, node))
        return frozenset(given[n] for n, place in self.inputs.items() if place in self.inner.wide)

    def run(self, node: fx.Node, around: Pass, outer: ChunkGraph) -> Any:
        """What the layer returns for the rows of a chunk."""

        def met(arg: fx.Node) -> Any:
            if outer.kinds[arg] is NodeKind.WHOLE:
                return outer.whole[arg]
            return around.wide[arg] if arg in around.wide else outer.value(arg, around)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), met)
        tensors = self.opened.arguments.tensors(args, kwargs)
        wide = {n for n, arg in _tensors_by_name(self.opened, node) if arg in around.wide}
        given: dict[fx.Node, Any] = {}
        for name, place in self.inputs.items():
            if self.inner.kinds[place] is not NodeKind.WHOLE:
                is_narrow = name in wide and place not in self.inner.wide
                given[place] = _narrow(tensors[name], around.rows) if is_narrow else tensors[name]
        found = self.inner.run(self.nodes, Pass(around.rows, given))
        leaves = [
            self.inner.value(leaf, found) if isinstance(leaf, fx.Node) else leaf
            for leaf in self.opened.trace.outputs
        ]
        return self.opened.trace.output.unflatten(leaves)


def _tensors_by_name(opened: OpenedLayer, node: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    """The arguments of a layer's forward by name, and the nodes that stand for them."""
    leaves = opened.arguments.leaves(node.args, node.kwargs)
    for name, leaf in zip(opened.arguments.names, leaves, strict=True):
        if name is not None:
            yield name, leaf


def _narrow(value: Any, rows: ChunkRows) -> Any:
    """Of extended rows those of the part."""
    return pytree.tree_map(
        lambda leaf: rows.narrow(leaf) if isinstance(leaf, Tensor) else leaf, value
    )


def _edges_of(node: fx.Node) -> Any:
    return node.args[0] if node.args else node.kwargs["edge_index"]


def _is_same(known: Tensor | None, tensor: Tensor) -> bool:
    if known is None:
        return False
    alike = known.shape == tensor.shape and known.dtype == tensor.dtype
    is_it = known.data_ptr() == tensor.data_ptr() and known._version == tensor._version
    return alike and (is_it or torch.equal(known, tensor))
