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

from collections.abc import Callable, Mapping, Sequence
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
from lightning_gpp.gnn.message_passing import Mixing


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
        cut: of whole values, the rows that were met: by whether these are extended ones, or by the
            edges that they belong to.
    """

    rows: ChunkRows
    values: dict[fx.Node, Any] = field(default_factory=dict)
    wide: dict[fx.Node, Any] = field(default_factory=dict)
    cut: dict[tuple[fx.Node, bool | EdgeSet], Any] = field(default_factory=dict)


class GraphValues:
    """The nodes of a forward, their kinds, and their values where all chunks have the same.

    Args:
        module: whose forward it is.
        nodes: in the order in which they run, the output left out.
        staying: names of the arguments that are the same for all chunks; the others have a row per
            vertex.
        arguments: the former that are at hand.
        around: what it shares with others.

    Attributes:
        kinds: of all nodes.
        arguments: those that are the same for all chunks and at hand, by name.
        device: that chunks run on.
        wide: nodes whose values have the rows of mirrors, too.
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
                        f"{error.location} decides by the size of the graph, and otherwise for the "
                        "one (a small one, maybe) that the model was captured with: make the "
                        "decision before forward is called, or give GNNPipeStrategy(mode='exact')"
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
        return self.around.edge_set(mixing.sources_first(value))

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
            seen, rows = observation(arg), found.rows
            if not seen.has_tensors:
                return self.whole_value(arg)
            shape = list(seen.shapes[0])
            if shape[:1] == [self.around.num_example]:
                shape[0] = len(rows.extended if wide else rows.vertices)
            return torch.empty(shape, dtype=seen.dtypes[0], device="meta")

        return self._run(node, shaped)

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
        if wide and node in found.wide:
            return found.wide[node]
        if kind is not NodeKind.WHOLE or node in found.values:
            is_narrow = wide or node not in self.wide
            return found.values[node] if is_narrow else found.rows.narrow(found.values[node])
        if (node, wide) not in found.cut:

            def cut(leaf: Any) -> Any:
                has_rows = leaf.shape[:1] == (self.around.chunks.num_vertices,)
                return found.rows.of(leaf, wide=wide) if has_rows else leaf

            found.cut[node, wide] = pytree.tree_map_only(Tensor, cut, self.whole_value(node))
        return found.cut[node, wide]
