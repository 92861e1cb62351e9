"""How every value of a traced graph goes with the samples of a micro-batch, or with vertices.

Both are told from what a value is at two numbers of samples.

Where stages take micro-batches of different sizes, values are cut and joined between them. Shapes
alone do not tell how: ``arange(batch_size)`` grows with the samples, but its second half is not
what the second half of the samples would make of it. So what a value *depends on* is followed
through the graph, and numbers are compared at two numbers of samples. A model that is called with
one graph has vertices in the place of samples: there rows of a value are told by their number, as
each may depend on all vertices anyway.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lightning_gpp.capture.operators.observe import Observation
from lightning_gpp.capture.values.samples import GraphInputs, Sample
from lightning_gpp.capture.values.structure import LOOK_UPS
from lightning_gpp.graph import Variation

_SAMPLES, _SAME = Variation.SAMPLES, Variation.SAME
_COUNT, _WHOLE = Variation.COUNT, Variation.WHOLE

_SHAPES = frozenset({"size", "dim", "numel", "ndimension", "__len__", "shape", "ndim", "dtype"})
"""Methods and attributes that tell of a tensor's shape and not of its contents."""

_FILLED = frozenset(
    {"expand", "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"}
)
"""Functions that give every sample the same when asked for so many samples."""

_ORDERS = frozenset({"argsort", "sort", "msort"})
"""Functions that return places among the entries of a dimension."""

_SELECT = frozenset({"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"})
"""Functions that return as many rows as the data say."""

_LINEAR: frozenset[Callable[..., Any]] = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv}
)


@dataclass(slots=True)
class _Walk:
    """One pass over the nodes in the order in which they run.

    Attributes:
        seen: what every node did with the first sample.
        others: with a second one; None where there is none of another size.
        ratio: samples of the second over samples of the first.
        batched: whether all tensors of a value have a dimension of the samples.
        by_vertex: whether all have one of the vertices of the one graph that is given.
        ways: what was found so far.
        shapes: nodes that are tuples of sizes, of which single ones may be looked up.
    """

    seen: Mapping[fx.Node, Observation]
    others: Mapping[fx.Node, Observation] | None
    ratio: float
    batched: Mapping[str, bool]
    by_vertex: Mapping[str, bool]
    ways: dict[fx.Node, Variation] = field(default_factory=dict)
    shapes: set[fx.Node] = field(default_factory=set)

    def visit(self, node: fx.Node) -> None:
        reads = [self.ways[arg] for arg in node.all_input_nodes]
        if node.op == "placeholder":
            self.ways[node] = self._of_argument(node)
        elif self.seen[node].has_tensors:
            self.ways[node] = self._of_tensors(node, reads)
        else:
            self.ways[node] = self._of_plain(node, reads)
        self._note_changes(node)

    def _of_argument(self, node: fx.Node) -> Variation:
        if self.batched[node.name]:
            return _SAMPLES
        # Without a second number of samples nobody knows: they may be in another dimension. One
        # that changed with them otherwise (the nodes of a batch of graphs) holds all of them.
        if self.others is None or self.others[node].shapes != self.seen[node].shapes:
            return self._otherwise(node)
        return _SAME

    def _of_tensors(self, node: fx.Node, reads: Sequence[Variation]) -> Variation:
        if all(way is _SAME for way in reads):
            return _SAME
        name = getattr(node.target, "__name__", str(node.target))
        if self._selects(node, name) or self._is_among_samples(node, name):
            return _WHOLE
        if _SAMPLES in reads:
            return _SAMPLES
        filled = name in _FILLED
        return _SAMPLES if filled and self.batched[node.name] else self._otherwise(node)

    def _is_among_samples(self, node: fx.Node, name: str) -> bool:
        """Whether entries are places among the samples, or of pairs of them."""
        if self.others is None or not self.batched[node.name]:
            return False
        (shape, *_), (other, *_) = self.seen[node].shapes, self.others[node].shapes
        grown = [size != twin and size * self.ratio == twin for size, twin in zip(shape, other)]
        if name in _ORDERS:
            given = dict(enumerate(node.args)) | node.kwargs
            dim = given.get("dim", given.get(1, 0 if name == "msort" else -1))
            return isinstance(dim, int) and grown[dim]
        return sum(grown) > 1

    def _selects(self, node: fx.Node, name: str) -> bool:
        """Whether there are as many rows as the data say, though maybe not with these data."""
        if name == "repeat_interleave":
            return len(node.all_input_nodes) > 1
        by_mask = name in ("getitem", "__getitem__") and any(
            torch.bool in self.seen[arg].dtypes for arg in node.all_input_nodes[1:]
        )
        return by_mask or name in _SELECT

    def _otherwise(self, node: fx.Node) -> Variation:
        return Variation.VERTICES if self.by_vertex[node.name] else _WHOLE

    def _of_plain(self, node: fx.Node, reads: Sequence[Variation]) -> Variation:
        if all(way is _SAME for way in reads):
            return _SAME
        if tells_shape(node):
            self.shapes.add(node)
            return self._compared(node, equal=_SAME)
        if node.target in LOOK_UPS and node.args[0] in self.shapes:
            return self._compared(node, equal=_SAME)
        if node.target in _LINEAR and set(reads) <= {_SAME, _COUNT}:
            return self._compared(node, equal=_WHOLE)
        return _WHOLE

    def _compared(self, node: fx.Node, *, equal: Variation) -> Variation:
        if self.others is None:
            return _WHOLE
        first, second = self.seen[node].value, self.others[node].value
        if type(first) is type(second) and first == second:
            return equal
        is_number = isinstance(first, int | float) and not isinstance(first, bool)
        return _COUNT if is_number and first * self.ratio == second else _WHOLE

    def _note_changes(self, node: fx.Node) -> None:
        """What a node changes in place depends on all that it reads from then on."""
        if not self.seen[node].changed or self.ways[node] is _SAME:
            return
        for earlier in self.ways:
            if self.seen[earlier].touched & self.seen[node].changed and earlier.op != "get_attr":
                whole = not self.batched[earlier.name]
                self.ways[earlier] = self._otherwise(earlier) if whole else self.ways[node]


def variations(
    nodes: Sequence[fx.Node],
    seen: Mapping[fx.Node, Observation],
    others: Mapping[fx.Node, Observation] | None,
    ratio: float,
    batch_dims: Mapping[str, tuple[int | None, ...]],
    vertex_dims: Mapping[str, tuple[int | None, ...]],
) -> dict[str, Variation]:
    """How the value of every node goes with the samples.

    Args:
        nodes: in the order in which they run, the output left out.
        seen: what every node did.
        others: what they did with another number of samples; None where there was none.
        ratio: of these numbers, the other's over the first's.
        batch_dims: value name -> dimension of the samples for each of its tensors.
        vertex_dims: value name -> dimension of the vertices for each.
    """
    others = others if ratio != 1 else None
    walk = _Walk(seen, others, ratio, _all_have(batch_dims), _all_have(vertex_dims))
    for node in nodes:
        walk.visit(node)
    return {node.name: way for node, way in walk.ways.items()}


def tells_shape(node: fx.Node) -> bool:
    """Whether a node asks for the shape or type of a tensor, and not for what is in it."""
    if node.op == "call_method":
        return str(node.target) in _SHAPES
    return (node.target is getattr and node.args[1] in _SHAPES) or node.target is len


def _all_have(dims: Mapping[str, tuple[int | None, ...]]) -> dict[str, bool]:
    return {name: bool(found) and None not in found for name, found in dims.items()}


Dims = Mapping[str, tuple[int | None, ...]]


@dataclass(frozen=True, slots=True)
class Cuts:
    """How values can be cut, all by the name of the value.

    Attributes:
        batch_dims: dimension of the samples of each tensor in a value.
        vertex_dims: dimension of the vertices of each, where the model is called with one graph.
        variations: how a value goes with the samples or vertices.
        one_graph: whether the model is called with one graph, and not with a batch of them.
    """

    batch_dims: Dims = field(default_factory=dict)
    vertex_dims: Dims = field(default_factory=dict)
    variations: Mapping[str, Variation] = field(default_factory=dict)
    one_graph: bool = False

    @classmethod
    def of(
        cls,
        seen: Mapping[fx.Node, Observation],
        sample: Sample,
        others: Mapping[fx.Node, Observation] | None,
        second: Sample | None,
    ) -> Cuts:
        """Finds them.

        Args:
            seen: what every node did with the first sample, in the order in which they run.
            sample: the first.
            others: what they did with a second one; None where there is none.
            second: the second one.
        """
        graphs = sample.graphs
        num = sample.num_samples
        other_num = second.num_samples if second else num
        pairs = {
            node.name: list(_paired(seen[node].shapes, (others or seen)[node].shapes))
            for node in seen
        }
        batch_dims = {
            name: tuple(_batch_dim(*pair, num, other_num) for pair in shapes)
            for name, shapes in pairs.items()
        }
        vertices = None
        if graphs is not None and not graphs.is_batch and second is not None:
            found = GraphInputs.find(second.tensors)
            vertices = None if found is None else (graphs.num_nodes, found.num_nodes)
        vertex_dims = {
            name: tuple(_vertex_dim(*pair, vertices) for pair in shapes)
            for name, shapes in pairs.items()
        }
        ways = variations(list(seen), seen, others, other_num / num, batch_dims, vertex_dims)
        return cls(batch_dims, vertex_dims, ways, graphs is not None and not graphs.is_batch)

    def stays(self, name: str, requires_grad: bool) -> bool:
        """Whether all calls are expected to bring the same for an input."""
        same = self.one_graph or self.variations[name] is Variation.SAME
        return same and not requires_grad


_Shape = tuple[int, ...]


def _paired(shapes: Sequence[_Shape], others: Sequence[_Shape]) -> Iterator[tuple[_Shape, _Shape]]:
    """Shapes at two numbers of samples; with themselves where there are not as many, at random."""
    return zip(shapes, others if len(others) == len(shapes) else shapes, strict=True)


def _batch_dim(shape: _Shape, other: _Shape, num: int, other_num: int) -> int | None:
    """The dimension that grew in proportion to the number of samples."""
    for dim, (size, other_size) in enumerate(zip(shape, other, strict=False)):
        if size != other_size and size * other_num == other_size * num:
            return dim
    return None


def _vertex_dim(shape: _Shape, other: _Shape, vertices: tuple[int, int] | None) -> int | None:
    """The dimension that has as many entries as the graph has vertices, both times."""
    return next(
        (dim for dim, sizes in enumerate(zip(shape, other, strict=False)) if sizes == vertices),
        None,
    )
