"""How each value of a traced graph depends on the samples, and where samples meet.

Where stages take micro-batches of different sizes, values are cut and joined between them. Shapes
alone do not tell how: ``arange(batch_size)`` grows with the samples, but its second half is not
what the second half of the samples would make of it. So what a value *depends on* is followed
through the graph, and numbers are compared at two numbers of samples.

Likewise whether samples meet. To run a few samples and to compare tells less: that a batch has no
padding, or only samples of one length, hides what the next one shows. A tensor without a dimension
that grows with the samples, computed from one that has such, holds all of them (a sum, the longest
length); so does all that is computed from it. Samples meet in all pairs of them, too, and in
functions that look along their dimension. And where a number is read out of the data, nobody knows
what Python does with it. Whether samples that are put into another order meet there is not known
here, nor what extensions and modules that stay whole do: that has to be tried.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lightning_gpp.capture.operators.observe import Observation
from lightning_gpp.capture.tracing.keep_whole import is_of_library, only_raises
from lightning_gpp.capture.tracing.trace import SELECTORS, SIZES, closure, rebuild
from lightning_gpp.capture.values.samples import Sample
from lightning_gpp.capture.values.structure import LOOK_UPS, leaves_of
from lightning_gpp.graph import Variation

_SAMPLES, _SAME = Variation.SAMPLES, Variation.SAME
_COUNT, _WHOLE = Variation.COUNT, Variation.WHOLE

_SHAPES = SIZES | {"dim", "ndimension", "ndim", "dtype"}
"""Methods and attributes that tell of a tensor's shape and not of its contents."""

_FILLED = frozenset(
    {"expand", "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"}
)
"""Functions that give every sample the same when asked for so many samples."""

_ORDERS = frozenset({"argsort", "sort", "msort"})
"""Functions that return places among the entries of a dimension."""

_SELECT = SELECTORS | {"_pack_padded_sequence"}
"""Functions that return as many rows as the data say."""

_READ = frozenset({"item", "tolist", "bincount", "unique", "unique_consecutive", "_unique2"})
"""Functions that give Python a number out of the data, or as many entries as they say."""

_BY_SHAPE = frozenset(
    {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}
    | {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"}
)
"""Functions that look at the shape and the type of their first argument only."""

_BY_FIRST = frozenset({"type_as", "to", "expand_as", "view_as", "reshape_as"})
"""Those that look at shapes and types only, but of the first argument."""

_ALONG: dict[str, tuple[int, tuple[int, ...]]] = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "logcumsumexp"), (1, (-1,))),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), (1, (-1,))),
    **dict.fromkeys(("diff", "fft_fft", "fft_ifft", "fft_hfft", "fft_ihfft"), (2, (-1,))),
    "normalize": (2, (1,)),
    "roll": (2, ()),
    "flip": (1, ()),
    "flipud": (1, (0,)),
}
"""Functions whose entries depend on others along some dimensions: the position of the argument that
names these, and its default (empty: all dimensions)."""

_LINEAR: frozenset[Callable[..., Any]] = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv}
)

_Dims = tuple[int | None, ...]
_Rows = frozenset[tuple[int, int]]


@dataclass(slots=True)
class _Followed:
    """What is known of a value.

    Attributes:
        dims: the dimension of the samples of each of its tensors.
        way: how it goes with the samples.
        is_shape: whether it is a tuple of sizes, of which single ones may be looked up.
        has_samples: whether its entries are of samples.
        met: where samples met that all of it depends on.
        rows: lengths of dimensions that the data decide, with both numbers of samples.
        is_per_sample: whether each tensor has a dimension of the samples.
        meets: whether samples meet in the node itself.
    """

    dims: _Dims
    way: Variation = _WHOLE
    is_shape: bool = False
    has_samples: bool = False
    met: str | None = None
    rows: _Rows = frozenset()
    is_per_sample: bool = False
    meets: bool = False

    @property
    def is_batched(self) -> bool:
        """Whether all of its tensors have a dimension of the samples."""
        return bool(self.dims) and None not in self.dims


@dataclass(slots=True)
class _Walk:
    """One pass over the nodes in the order in which they run.

    Attributes:
        seen: what every node did with the first sample.
        others: with a second one; None where there is none of another size.
        num: samples of the first.
        other_num: samples of the second.
        of_graphs: whether samples are graphs, which have any number of nodes.
        known: what was found so far.
        decision: why nobody knows what is computed from them; None where nothing is read.
    """

    seen: Mapping[fx.Node, Observation]
    others: Mapping[fx.Node, Observation] | None
    num: int
    other_num: int
    of_graphs: bool
    known: dict[fx.Node, _Followed] = field(default_factory=dict)
    decision: str | None = None

    def visit(self, node: fx.Node) -> None:
        shapes, seen = self._shapes(node), self.seen[node]
        growing = ([self._grows(*pair) for pair in pairs] for pairs in shapes)
        known = _Followed(tuple(grown.index(True) if any(grown) else None for grown in growing))
        self.known[node] = known
        reads = [self.known[arg].way for arg in node.all_input_nodes]
        if node.op == "placeholder":
            known.way = self._of_argument(node)
        elif all(each is _SAME for each in reads):
            known.way = _SAME
        else:
            known.way = (self._of_tensors if seen.has_tensors else self._of_plain)(node, reads)
        self._follow(node, shapes)
        if not seen.changed:
            return
        for node_before, earlier in self.known.items():
            # what it changes depends on all that it reads from now on
            if self.seen[node_before].touched & seen.changed and node_before.op != "get_attr":
                if known.way is not _SAME:
                    earlier.way = known.way if earlier.is_batched else _WHOLE
                if known.has_samples:
                    earlier.has_samples, earlier.met = True, earlier.met or known.met

    def _shapes(self, node: fx.Node) -> list[list[tuple[int, int]]]:
        """Of every tensor in a value the sizes of each dimension with both numbers of samples."""
        shapes = self.seen[node].shapes
        twins = shapes if self.others is None else self.others[node].shapes
        if len(twins) != len(shapes):  # at random
            twins = shapes
        return [list(zip(*both)) for both in zip(shapes, twins)]

    def _grows(self, size: int, twin: int) -> bool:
        """Fewer entries than samples are not of one each (``x.chunk(2)``, ``x[::2]``)."""
        is_per_sample = size % self.num == 0 and size * self.other_num == twin * self.num
        return is_per_sample and size != twin

    def _goes(self, size: int, twin: int) -> bool:
        return size != twin if self.of_graphs else self._grows(size, twin)

    def _of_argument(self, node: fx.Node) -> Variation:
        if self.known[node].is_batched:
            return _SAMPLES
        # Without a second number of samples nobody knows: they may be in another dimension. One
        # that changed with them otherwise (the nodes of a batch of graphs) holds all of them.
        if self.others is None or self.others[node].shapes != self.seen[node].shapes:
            return _WHOLE
        return _SAME

    def _of_tensors(self, node: fx.Node, reads: Sequence[Variation]) -> Variation:
        if self._selects(node) or self._is_among_samples(node):
            return _WHOLE
        if _SAMPLES in reads:
            return _SAMPLES
        return _SAMPLES if _name(node) in _FILLED and self.known[node].is_batched else _WHOLE

    def _is_among_samples(self, node: fx.Node) -> bool:
        """Whether entries are places among the samples, or of pairs of them."""
        if self.others is None or not self.known[node].is_batched:
            return False
        (shape, *_), (other, *_) = self.seen[node].shapes, self.others[node].shapes
        grown, name = list(map(self._grows, shape, other)), _name(node)
        if name in _ORDERS:
            given = dict(enumerate(node.args)) | node.kwargs
            dim = given.get("dim", given.get(1, 0 if name == "msort" else -1))
            return isinstance(dim, int) and grown[dim]
        return sum(grown) > 1

    def _selects(self, node: fx.Node) -> bool:
        """Whether there are as many rows as the data say, though maybe not with these data."""
        name, num_read = _name(node), len(node.all_input_nodes)
        by_mask = name in ("getitem", "__getitem__") and any(
            torch.bool in self.seen[arg].dtypes for arg in node.all_input_nodes[1:]
        )
        by_number = (name == "repeat_interleave" and num_read > 1) or (
            name == "where" and num_read == 1
        )
        return by_mask or by_number or name in _SELECT

    def _of_plain(self, node: fx.Node, reads: Sequence[Variation]) -> Variation:
        known = self.known[node]
        known.is_shape = tells_shape(node)
        of: Any = node.args[0] if node.target in LOOK_UPS else node
        if known.is_shape or self.known.get(of, known).is_shape:
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
        return _COUNT if is_number and first * self.other_num == second * self.num else _WHOLE

    # Where samples meet ----------------------------------------------------------------------

    def _follow(self, node: fx.Node, shapes: Sequence[Sequence[tuple[int, int]]]) -> None:
        name, known = _name(node), self.known[node]
        grown = [any(self._goes(*pair) for pair in pairs) for pairs in shapes]
        known.has_samples, known.is_per_sample = any(grown), all(grown)
        if node.op == "placeholder" or self.others is None:
            return
        read = [arg for arg in node.all_input_nodes if self.seen[arg].has_tensors]
        read = read[:1] if name in _BY_FIRST else read[1:] if name in _BY_SHAPE else read
        operands = [self.known[arg] for arg in read]
        if not any(item.has_samples for item in operands):
            operands = []
        elif self.decision is None and self._is_read(node, operands):
            self.decision = f"{node.meta['location']} reads a number out of the data ({name})"
        met = next((item.met for item in operands if item.met), None)
        rows = _Rows().union(*(item.rows for item in operands))
        of_data = bool(operands) and self._selects(node)
        if of_data:
            rows |= {pair for pairs in shapes for pair in pairs if pair[0] != pair[1]}
        is_only_handed_on = node.target is rebuild or (
            node.target in LOOK_UPS and not self.seen[node.args[0]].is_tensor  # type: ignore[index]
        )
        for pairs, has_grown, dtype in zip(shapes, grown, self.seen[node].dtypes):
            if name == "randperm" and has_grown:
                known.meets = True
                met = f"{node.meta['location']} draws an order of the samples (randperm)"
            if not operands or is_only_handed_on or of_data:
                continue
            is_part = node.op == "call_module" and not self.seen[node].is_tensor
            if is_part and not dtype.is_floating_point:  # lengths of a packed sequence
                continue
            if not (has_grown or rows.intersection(pairs)) or self._mixes(node, pairs):
                known.meets = True
                met = met or f"{node.meta['location']} brings samples together ({name})"
        known.met, known.rows = met, rows & {pair for pairs in shapes for pair in pairs}
        is_number = not shapes and not self.seen[node].changed  # of sizes, or a decision
        known.has_samples = bool(operands) and not is_number

    def _mixes(self, node: fx.Node, pairs: Sequence[tuple[int, int]]) -> bool:
        """Whether a result that keeps the dimension of the samples has entries of several."""
        dims = [dim for dim, pair in enumerate(pairs) if self._goes(*pair)]
        if self.of_graphs or len(dims) > 1:  # pairs of samples
            return not self.of_graphs
        name = _name(node)
        if name not in _ALONG:
            return False
        place, left_out = _ALONG[name]
        last = None if name == "flip" else place + 1  # x.flip(0, 1)
        given = node.kwargs.get("dim", node.kwargs.get("dims", node.args[place:last]))
        along = [each for each in leaves_of(given) if type(each) is int]
        return any(dim % len(pairs) in dims for dim in along or left_out or range(len(pairs)))

    def _is_read(self, node: fx.Node, operands: Sequence[_Followed]) -> bool:
        """Whether Python knows something of the data from then on."""
        name = _name(node)
        if _is_in_vain(node):
            return False
        if name in _READ or (name in SIZES and operands[0].rows):
            return True
        given = leaves_of([node.args[1:], node.kwargs])
        bounds = (part for s in given if isinstance(s, slice) for part in (s.start, s.stop, s.step))
        if any(isinstance(b, fx.Node) and self.known[b].has_samples for b in bounds):
            return True
        if name == "_pad_packed_sequence":  # to the longest, or to a length that is given
            lengths, longest = node.args[1], node.args[4]
            start = [longest] if isinstance(longest, fx.Node) else []
            return lengths in closure(start, lambda each: each.all_input_nodes)
        numbers = (isinstance(each, fx.Node) or each > 0 for each in given)
        return name == "one_hot" and not any(numbers)


def reads_data(node: fx.Node) -> bool:
    """Whether a node gives Python a number out of the arguments, as far as its name tells."""
    if _name(node) not in _READ or _is_in_vain(node):
        return False
    return any(each.op == "placeholder" for each in closure([node], lambda n: n.all_input_nodes))


def _is_in_vain(node: fx.Node) -> bool:
    """Whether what Python learns from a node is not what a result is computed from."""
    location = node.meta["location"]
    return only_raises(location) or is_of_library(location)


def _name(node: fx.Node) -> str:
    """Of the function, method or attribute that a node calls."""
    if node.op == "call_module":
        return f"module {node.target}"
    name = node.args[1] if node.target is getattr else getattr(node.target, "__name__", None)
    return str(name or node.target)


def tells_shape(node: fx.Node) -> bool:
    """Whether a node asks for the shape or type of a tensor, and not for what is in it."""
    if node.op == "call_method":
        return str(node.target) in _SHAPES
    return (node.target is getattr and node.args[1] in _SHAPES) or node.target is len


@dataclass(frozen=True, slots=True)
class Cuts:
    """How values can be cut, by name of the value.

    Attributes:
        batch_dims: dimension of the samples of each tensor in a value.
        variations: how a value goes with the samples.
        met: where samples met that a value depends on, and whether it has entries of each.
        meeting: names of the values in whose making they met.
        decision: why nobody knows what is computed from them; None where nothing is read.
        one_graph: whether the model is called with one graph, and not with a batch of them.
    """

    batch_dims: Mapping[str, _Dims] = field(default_factory=dict)
    variations: Mapping[str, Variation] = field(default_factory=dict)
    met: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    meeting: frozenset[str] = frozenset()
    decision: str | None = None
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
        num, other_num = sample.num_samples, (second or sample).num_samples
        others, graphs = others if num != other_num else None, sample.graphs
        walk = _Walk(seen, others, num, other_num, graphs is not None)
        for node in seen:
            walk.visit(node)
        return cls(
            {node.name: known.dims for node, known in walk.known.items()},
            {node.name: known.way for node, known in walk.known.items()},
            {n.name: (k.met, k.is_per_sample) for n, k in walk.known.items() if k.met},
            frozenset(n.name for n, k in walk.known.items() if k.meets),
            walk.decision
            if others or graphs
            else f"its forward was captured with {num} samples only",
            graphs is not None and not graphs.is_batch,
        )

    def stays(self, name: str, requires_grad: bool) -> bool:
        """Whether all calls are expected to bring the same for an input."""
        same = self.one_graph or self.variations[name] is Variation.SAME
        return same and not requires_grad
