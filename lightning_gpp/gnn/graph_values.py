"""What the values of a forward have to do with the graph, before any chunk runs.

Every node is of a kind:

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from lightning_gpp.capture.errors import GuardError
from lightning_gpp.capture.operators.observe import observation, run_node
from lightning_gpp.capture.operators.variation import tells_shape
from lightning_gpp.capture.tracing.trace import guard
from lightning_gpp.gnn.chunks import ChunkRows, Chunks, EdgeSet, Remembered
from lightning_gpp.gnn.errors import GraphTrainingError
from lightning_gpp.gnn.history import History, Techniques
from lightning_gpp.gnn.message_passing import Mixing, is_layer


class NodeKind(Enum):
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
        chunks: of the vertices.
        num_example: vertices of the graph that the model was captured with.
        techniques: how histories are used.
        edge_sets: lists of edges that messages are passed on and somebody has; equal ones are one.
        histories: by the way, the node that reads them and the argument.
        epoch: training passes that have begun, less one.
        fills: whether a pass over all vertices writes the histories.
    """

    chunks: Chunks
    num_example: int
    techniques: Techniques
    edge_sets: WeakSet[EdgeSet] = field(default_factory=WeakSet)
    histories: dict[tuple[int, str, str], History] = field(default_factory=dict)
    epoch: int = -1
    fills: bool = False

    def edge_set(self, edge_index: Tensor) -> EdgeSet:
        """The set of a list of edges (sources, targets)."""
        for known in self.edge_sets:
            if known.edges.is_that_of(edge_index):
                return known
        new = EdgeSet(edge_index, self.chunks)
        self.edge_sets.add(new)
        return new

    def mirror(self) -> None:
        """From now on ways exchange what messages along all known edges need."""
        edges = [known.edges.tensor for known in self.edge_sets]
        self.chunks = self.chunks.with_mirrors(edges)
        for known in self.edge_sets:
            known.chunks = self.chunks

    @cached_property
    def everything(self) -> ChunkRows:
        """All vertices."""
        return self.chunks.one_way().rows(None)

    def history(self, key: tuple[int, str, str], like: Tensor) -> History:
        """The history of a value; made when it is first asked for."""
        if key not in self.histories:
            shape = (len(self.chunks.read_by[key[0]]), *like.shape[1:])
            self.histories[key] = History.zeros(self.techniques, shape, like.detach())
        return self.histories[key]


@dataclass(frozen=True, slots=True)
class Pass:
    """One run over some vertices.

    Attributes:
        rows: of the vertices.
        values: of the nodes that ran, and those that were given.
        wide: of some nodes, the extended rows: with those of mirrors.
        cut: of whole values, the rows that were met, by whether they are extended.
    """

    rows: ChunkRows
    values: dict[fx.Node, Any] = field(default_factory=dict)
    wide: dict[fx.Node, Any] = field(default_factory=dict)
    cut: dict[tuple[fx.Node, bool], Any] = field(default_factory=dict)


class GraphValues:
    """The nodes of a forward, their kinds, and their values where all chunks have the same.

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

    Attributes:
        kinds: of all nodes.
        whole: the values that are the same for all chunks.
        edge_sets: of the nodes that pass messages or have a row per edge.
        arguments: those that are the same for all chunks, by name.
        wide: nodes whose values have the rows of mirrors, too.
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
        self.kinds: dict[fx.Node, NodeKind] = {}
        self.whole: dict[fx.Node, Any] = {}
        self.edge_sets: dict[fx.Node, EdgeSet] = {}
        self.wide: frozenset[fx.Node] = frozenset()
        self.arguments = {each: Remembered(tensor) for each, tensor in whole.items()}
        self._weights, self._small_arguments = weights, small
        self._small = self.whole if small is None else dict[fx.Node, Any]()
        """Whole values of the graph that the model was traced with."""
        self._compute()

    @property
    def has_example(self) -> bool:
        """Whether the forward was traced with another graph."""
        return self._small_arguments is not None

    def update(self, whole: Mapping[str, Tensor]) -> None:
        """Takes arguments that are the same for all chunks."""
        if not all(self.arguments[name].is_that_of(new) for name, new in whole.items()):
            self.arguments |= {name: Remembered(new) for name, new in whole.items()}
            self._compute()

    # Kinds -----------------------------------------------------------------------------------

    def _compute(self) -> None:
        self.whole.clear()
        self._small.clear()
        with torch.no_grad():
            for node in self.nodes:
                self.kinds[node] = self._kind(node)
        if self.has_example:
            self._check_guards()

    def _kind(self, node: fx.Node) -> NodeKind:
        seen = observation(node)
        reads = {self.kinds[arg] for arg in node.all_input_nodes}
        if node.op == "placeholder":
            return self._kind_of_argument(node)
        if node.op == "get_attr":
            return NodeKind.WEIGHTS
        if isinstance(node.target, Mixing):
            self.edge_sets[node] = self._edge_set(node)
            return NodeKind.ROWS if node.target.method == "propagate" else NodeKind.EDGES
        if is_layer(node, self.module):
            return NodeKind.ROWS
        if not seen.has_tensors:
            return self._kind_of_plain(node, reads)
        if NodeKind.ROWS in reads:
            return NodeKind.ROWS
        if NodeKind.EDGES in reads:
            known = (self.edge_sets.get(arg) for arg in node.all_input_nodes)
            self.edge_sets[node] = next(edges for edges in known if edges is not None)
            return NodeKind.EDGES
        has_rows = all(shape[:1] == (self.around.num_example,) for shape in seen.shapes)
        if NodeKind.WEIGHTS in reads or self._has_tensors(node):
            return NodeKind.ROWS if has_rows else NodeKind.WEIGHTS
        return self._evaluated(node, has_rows)

    def _kind_of_argument(self, node: fx.Node) -> NodeKind:
        name = str(node.target)
        if name in self._weights:
            return NodeKind.WEIGHTS
        if name not in self.arguments:
            return NodeKind.ROWS
        self.whole[node] = self.arguments[name].tensor
        if self._small_arguments is not None:
            self._small[node] = self._small_arguments[name]
        return NodeKind.WHOLE

    def _kind_of_plain(self, node: fx.Node, reads: set[NodeKind]) -> NodeKind:
        """Numbers out of shapes are of the chunk, too; others are of the graph as a whole."""
        if node.target is not guard and all(arg in self.whole for arg in node.all_input_nodes):
            self._evaluated(node, has_rows=False)
        is_number = not tells_shape(node) and reads <= {NodeKind.WHOLE}
        return NodeKind.WHOLE if is_number else NodeKind.SIZE

    def _evaluated(self, node: fx.Node, has_rows: bool) -> NodeKind:
        """Computes a whole value, unless it is random and every vertex can draw its own."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.whole_value)
        before = torch.random.get_rng_state()
        value = run_node(node, self.module, args, kwargs, {})
        if not torch.equal(before, torch.random.get_rng_state()):
            if has_rows:
                return NodeKind.ROWS
            raise GraphTrainingError(
                f"{node.meta['location']} draws random numbers for the graph as a whole, which "
                "stages on several devices would draw differently: make the graph before forward "
                "is called and pass it as an argument"
            )
        self.whole[node] = value
        if self.has_example:

            def small(arg: fx.Node) -> Any:
                return self._small[arg] if arg in self._small else observation(arg).value

            args, kwargs = fx.node.map_arg((node.args, node.kwargs), small)
            self._small[node] = run_node(node, self.module, args, kwargs, {})
        return NodeKind.WHOLE

    def _has_tensors(self, node: fx.Node) -> bool:
        if node.op != "call_module":
            return False
        called = self.module.get_submodule(str(node.target))
        return any(True for tensors in (called.parameters(), called.buffers()) for _ in tensors)

    def _edge_set(self, node: fx.Node) -> EdgeSet:
        edges, mixing = node.args[0] if node.args else node.kwargs["edge_index"], node.target
        assert isinstance(mixing, Mixing)
        value = self.whole.get(edges) if isinstance(edges, fx.Node) else edges
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            what = "are computed from features" if value is None else "are a sparse matrix"
            raise GraphTrainingError(
                f"the edges of the layer {self.name} ({type(mixing.layer).__name__}) {what}; "
                "training in chunks takes an edge_index of shape (2, edges) that is an argument of "
                "forward or made of arguments alone"
            )
        return self.around.edge_set(mixing.sources_first(value))

    @cached_property
    def changes(self) -> frozenset[int]:
        """The memory that nodes change in place which run for every chunk."""
        changed = (
            observation(n).changed for n in self.nodes if self.kinds[n] is not NodeKind.WHOLE
        )
        return frozenset().union(*changed)

    def _check_guards(self) -> None:
        """Checks that decisions by sizes are those that were made with the small graph.

        Raises:
            GraphTrainingError: one is not.
        """
        by_size = (NodeKind.WHOLE, NodeKind.SIZE)
        for node in self.nodes:
            read = [self.kinds[arg] for arg in node.all_input_nodes]
            if node.target is guard and all(kind in by_size for kind in read):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.whole_value)
                try:
                    run_node(node, self.module, args, kwargs, {})
                except GuardError as error:
                    raise GraphTrainingError(
                        f"{error.location} decides by the size of the graph, and otherwise for a "
                        "small graph, which the model is captured with: make the decision before "
                        "forward is called, or give GNNPipeStrategy(mode='exact')"
                    ) from error

    # Values ----------------------------------------------------------------------------------

    def whole_value(self, node: fx.Node) -> Any:
        """A value as the whole graph has it."""
        if node in self.whole:
            return self.whole[node]
        if self.kinds[node] is NodeKind.SIZE and self.has_example:
            return self.size(node, Pass(self.around.everything), wide=False)
        return observation(node).value

    def size(self, node: fx.Node, found: Pass, *, wide: bool) -> Any:
        """A number out of shapes, as the rows of a chunk have it.

        Args:
            node: whose value it is.
            found: the chunk, and what is known.
            wide: whether the rows of mirrors are among them.
        """

        def shaped(arg: fx.Node) -> Any:
            if arg in found.values:
                return self.value(arg, found, wide=wide)
            if self.kinds[arg] is NodeKind.SIZE:
                return self.size(arg, found, wide=wide)
            if arg in self.whole and not isinstance(self.whole[arg], Tensor):
                return self.whole[arg]
            seen, rows = observation(arg), found.rows
            shape = list(seen.shapes[0])
            if shape[:1] == [self.around.num_example]:
                shape[0] = len(rows.extended if wide else rows.vertices)
            return torch.empty(shape, dtype=seen.dtypes[0], device="meta")

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), shaped)
        return run_node(node, self.module, args, kwargs, {})

    def value(self, node: fx.Node, found: Pass, *, wide: bool = False) -> Any:
        """A value as the rows of a chunk see it, whole ones cut.

        Args:
            node: whose.
            found: the chunk, and what is known.
            wide: whether the rows of mirrors are asked for.
        """
        kind = self.kinds[node]
        if kind is NodeKind.SIZE:
            return self.size(node, found, wide=wide)
        if kind is not NodeKind.WHOLE:
            is_narrow = wide or node not in self.wide
            return found.values[node] if is_narrow else found.rows.narrow(found.values[node])
        if (node, wide) not in found.cut:

            def cut(leaf: Any) -> Any:
                if leaf.shape[:1] != (self.around.chunks.num_vertices,):
                    return leaf
                part = found.rows.of(leaf, wide=wide)
                is_changed = part is leaf and observation(node).touched & self.changes
                return part.clone() if is_changed else part

            found.cut[node, wide] = pytree.tree_map_only(Tensor, cut, self.whole[node])
        return found.cut[node, wide]

    def example(self, node: fx.Node) -> Any:
        """A value as large as when the model was traced, on the device of the arguments."""
        device = next((each.tensor.device for each in self.arguments.values()), None)
        if node in self._small:
            value = self._small[node]
        elif self.kinds[node] is NodeKind.SIZE:
            value = observation(node).value
        elif node.op == "get_attr":
            value = run_node(node, self.module, (), {}, {})
        else:
            seen = observation(node)
            value = torch.zeros(seen.shapes[0], dtype=seen.dtypes[0])
        return pytree.tree_map_only(Tensor, lambda each: each.to(device), value)
