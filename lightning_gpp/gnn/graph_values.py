"""What the values of a forward have to do with the graph, before any chunk runs.

What a value is: :mod:`.node_kinds`. Those that are whole are computed here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from lightning_gpp.capture.errors import GuardError
from lightning_gpp.capture.operators.observe import observation, run_node
from lightning_gpp.capture.operators.variation import tells_shape
from lightning_gpp.capture.tracing.trace import guard
from lightning_gpp.common.num_changes import num_changes
from lightning_gpp.gnn.chunks import ChunkRows, EdgeSet
from lightning_gpp.gnn.errors import GraphTrainingError
from lightning_gpp.gnn.message_passing import Mixing, is_layer
from lightning_gpp.gnn.node_kinds import NodeKind, Surroundings


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
        absent: names of arguments that are the same for all chunks and not here.

    Attributes:
        kinds: of all nodes.
        whole: the values that are the same for all chunks; where one is absent that it depends on,
            it is, too.
        edge_sets: of the nodes that pass messages or have a row per edge.
        changed: whole values that nodes change in place which run for every chunk.
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
        absent: frozenset[str] = frozenset(),
    ) -> None:
        self.name, self.module, self.nodes, self.around = name, module, nodes, around
        self.kinds: dict[fx.Node, NodeKind] = {}
        self.whole: dict[fx.Node, Any] = {}
        self.edge_sets: dict[fx.Node, EdgeSet] = {}
        self.changed: set[fx.Node] = set()
        self._arguments = {each: _Argument.of(tensor) for each, tensor in whole.items()}
        self._weights, self._absent = weights, absent
        self._small_arguments = None if small is None else dict(small)
        self._small: dict[fx.Node, Any] = {}
        self._compute()

    @property
    def arguments(self) -> frozenset[str]:
        """Names of the arguments that are the same for all chunks."""
        return frozenset(self._arguments)

    @property
    def has_example(self) -> bool:
        """Whether the forward was traced with another graph."""
        return self._small_arguments is not None

    def update(self, whole: Mapping[str, Tensor]) -> bool:
        """Takes arguments that are the same for all chunks; tells whether any has changed."""
        if all(self._arguments[name].is_that_of(new) for name, new in whole.items()):
            return False
        self._arguments |= {name: _Argument.of(new) for name, new in whole.items()}
        self._compute()
        return True

    def forget(self, names: frozenset[str]) -> None:
        """Lets go of arguments that no node which is going to run depends on."""
        self._absent |= names
        for name in names:
            self._arguments.pop(name, None)
        for node in self.nodes:
            if self._is_absent(node):
                self.whole.pop(node, None)

    def _is_absent(self, node: fx.Node) -> bool:
        """Whether a whole value depends on an argument that is not here."""
        if node.op == "placeholder":
            return str(node.target) in self._absent
        return any(
            self.kinds[arg] is NodeKind.WHOLE and arg not in self.whole
            for arg in node.all_input_nodes
        )

    # Kinds -----------------------------------------------------------------------------------

    def _compute(self) -> None:
        self.whole.clear()
        self._small.clear()
        with torch.no_grad():
            for node in self.nodes:
                self.kinds[node] = self._kind(node)
        self.changed = self._changed_by_rows()
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
            self.edge_sets[node] = next(
                self.edge_sets[arg]
                for arg in node.all_input_nodes
                if self.kinds[arg] is NodeKind.EDGES
            )
            return NodeKind.EDGES
        has_rows = all(shape[:1] == (self.around.num_example,) for shape in seen.shapes)
        if NodeKind.WEIGHTS in reads or self._has_tensors(node):
            return NodeKind.ROWS if has_rows else NodeKind.WEIGHTS
        return self._evaluated(node, has_rows)

    def _kind_of_argument(self, node: fx.Node) -> NodeKind:
        name = str(node.target)
        if name in self._weights:
            return NodeKind.WEIGHTS
        if name in self._absent:
            return NodeKind.WHOLE
        if name not in self._arguments:
            return NodeKind.ROWS
        self.whole[node] = self._arguments[name].tensor
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
        if self._is_absent(node):
            return NodeKind.WHOLE
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
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._small_value)
            self._small[node] = run_node(node, self.module, args, kwargs, {})
        return NodeKind.WHOLE

    def _has_tensors(self, node: fx.Node) -> bool:
        if node.op != "call_module":
            return False
        called = self.module.get_submodule(str(node.target))
        return next(called.parameters(), None) is not None or bool(list(called.buffers()))

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
        return self.around.edge_sets.find(mixing.sources_first(value))

    def _changed_by_rows(self) -> set[fx.Node]:
        changed = frozenset().union(
            *(
                observation(node).changed
                for node, kind in self.kinds.items()
                if kind is not NodeKind.WHOLE
            )
        )
        return {node for node in self.whole if observation(node).touched & changed}

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
            return self.size(node, self.around.everything, wide=False)
        return observation(node).value

    def size(
        self,
        node: fx.Node,
        rows: ChunkRows,
        *,
        wide: bool,
        known: Callable[[fx.Node], Any] = lambda _: None,
    ) -> Any:
        """A number out of shapes, as the rows of a chunk have it.

        Args:
            node: whose value it is.
            rows: of the chunk.
            wide: whether those of mirrors are among them.
            known: gives the value of a node that has run, None for others.
        """

        def shaped(arg: fx.Node) -> Any:
            value = known(arg)
            if value is not None:
                return value
            if self.kinds[arg] is NodeKind.SIZE:
                return self.size(arg, rows, wide=wide, known=known)
            if arg in self.whole and not isinstance(self.whole[arg], Tensor):
                return self.whole[arg]
            return self._shape_of(arg, rows, wide=wide)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), shaped)
        return run_node(node, self.module, args, kwargs, {})

    def _shape_of(self, node: fx.Node, rows: ChunkRows, *, wide: bool) -> Tensor:
        seen = observation(node)
        shape = list(seen.shapes[0])
        if shape[:1] == [self.around.num_example]:
            shape[0] = len(rows.extended if wide else rows.vertices)
        return torch.empty(shape, dtype=seen.dtypes[0], device="meta")

    def _small_value(self, node: fx.Node) -> Any:
        """A whole value of the graph that the model was traced with."""
        return self._small[node] if node in self._small else observation(node).value

    def example(self, node: fx.Node) -> Any:
        """A value as large as when the model was traced, on the device of the arguments."""
        device = next((each.tensor.device for each in self._arguments.values()), None)
        return pytree.tree_map_only(Tensor, lambda each: each.to(device), self._example(node))

    def _example(self, node: fx.Node) -> Any:
        if node in self._small:
            return self._small[node]
        if not self.has_example and node in self.whole:
            return self.whole[node]
        if self.kinds[node] is NodeKind.SIZE:
            return observation(node).value
        if self.kinds[node] is NodeKind.WEIGHTS and node.op == "get_attr":
            return run_node(node, self.module, (), {}, {})
        seen = observation(node)
        return torch.zeros(seen.shapes[0], dtype=seen.dtypes[0])


@dataclass(frozen=True, slots=True)
class _Argument:
    """An argument, and how often it had been changed when values were computed from it."""

    tensor: Tensor
    num_changes: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> _Argument:
        return cls(tensor, num_changes(tensor))

    def is_that_of(self, tensor: Tensor) -> bool:
        """Whether a tensor holds what this one did."""
        known = self.tensor
        if num_changes(known) != self.num_changes:
            return False
        alike = known.shape == tensor.shape and known.dtype == tensor.dtype
        alike = alike and known.device == tensor.device  # what is computed from it moves, too
        is_it = known.data_ptr() == tensor.data_ptr() and known.stride() == tensor.stride()
        return alike and (is_it or torch.equal(known, tensor))
