"""Whether samples meet in a forward, told from what it calls with two numbers of samples.

To run a few samples and to compare tells less: that a batch has no padding, or only samples of one
length, hides what the next one shows. So what is computed is followed from call to call. A tensor
without a dimension that grows with the samples, computed from one that has such, holds all of them
(a sum, the longest length); so does all that is computed from it. Samples meet in all pairs of
them, too, and in functions that look along their dimension. And where Python reads a number out of
the data, nobody knows what it does with it.

Whether samples that are put into another order meet there is not known here, nor is what extensions
do: that has to be tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lightning_gpp.capture.checks.tape import Seen, Tape, TapedCall
from lightning_gpp.capture.tracing.keep_whole import only_raises

_DECIDE = frozenset({"__bool__", "is_nonzero", "equal", "allclose", "__contains__"})
_READ = frozenset(
    {"item", "tolist", "numpy", "__array__", "__int__", "__float__", "__index__", "__complex__"}
    # as many entries as the data say, or padded to the longest
    | {"bincount", "unique", "unique_consecutive", "_unique2", "pad_packed_sequence"}
)
_SIZES = frozenset({"shape", "size", "numel", "nelement", "__len__"})
_SELECT = frozenset(
    {"nonzero", "argwhere", "masked_select", "repeat_interleave", "_pack_padded_sequence"}
)
"""Functions that return rows of their argument, as many as the data say."""
_Pair = tuple[tuple[int, ...], tuple[int, ...]]
_BY_SHAPE = frozenset(
    {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}
    | {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"}
)
"""Functions that look at the shape and the type of their first argument only."""
_MADE = frozenset({"zeros", "ones", "empty"})
"""Functions whose tensors are sizes."""
_ALONG = frozenset({"roll", "flip", "diff", "softmax", "log_softmax", "logcumsumexp"}) | {
    *("cumsum", "cumprod", "cummax", "cummin")
}
"""Functions whose entries look at others along the dimensions that they are given."""
_BY_FIRST = frozenset({"type_as", "to", "expand_as", "view_as", "reshape_as"})
"""Those that look at shapes and types only, but of the first argument."""


@dataclass(frozen=True, slots=True)
class SampleMeeting:
    """Where the samples of a batch meet.

    Attributes:
        decision: why nobody knows what is computed from them; None where nothing is read.
        outputs: of each leaf that forward returns, where samples met on the way; None where they
            did not.
        per_sample: whether it is a tensor with a dimension of the samples.
    """

    decision: str | None
    outputs: tuple[str | None, ...]
    per_sample: tuple[bool, ...]

    def why(self, names: Sequence[str | None], averaged: frozenset[str] | None) -> str | None:
        """Why micro-batches do not give what the whole batch does, as far as this tells.

        Args:
            names: of the leaves.
            averaged: those that are looked at, if what is not one entry per sample is averaged,
                and so is compared by its values; None looks at all.
        """
        if self.decision is not None:
            return self.decision
        for name, where, is_per_sample in zip(names, self.outputs, self.per_sample, strict=False):
            if where and (averaged is None or (is_per_sample and name in averaged)):
                return where
        return None


def meeting(
    first: Tape, second: Tape, num: int, other_num: int, *, of_graphs: bool
) -> SampleMeeting:
    """Where samples meet.

    Args:
        first: a forward with some samples.
        second: with another number of them; from where it goes another way, outputs are not known.
        num: how many samples the first has.
        other_num: how many the second has.
        of_graphs: whether samples are graphs, which have any number of nodes.
    """
    if num < other_num:
        first, second, num, other_num = second, first, other_num, num
    return _TapeWalk(num, other_num, of_graphs).over(first, second)


def _way(call: TapedCall) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return call.name, _numbers(call.operands), _numbers(call.results)


def _numbers(tensors: Sequence[Seen]) -> tuple[int, ...]:
    return tuple(tensor.number for tensor in tensors)


@dataclass(frozen=True, slots=True)
class _Followed:
    """What is known of a tensor.

    Attributes:
        has_samples: whether its entries are of samples.
        met: where samples met that all of it depends on.
        rows: lengths of its dimensions that the data decide, with both numbers of samples.
    """

    has_samples: bool = False
    met: str | None = None
    rows: frozenset[tuple[int, int]] = frozenset()


@dataclass(slots=True)
class _TapeWalk:
    num: int
    other_num: int
    of_graphs: bool
    known: dict[int, _Followed] = field(default_factory=dict)
    in_memory: dict[int, _Followed] = field(default_factory=dict)
    changed: dict[int, _Followed] = field(default_factory=dict)
    decision: str | None = None

    def over(self, first: Tape, second: Tape) -> SampleMeeting:
        for tensor, shapes in _shapes(first.inputs, second.inputs):
            self._set(tensor, _Followed(has_samples=self._grows(shapes)))
        is_same_way = list(map(_way, first.calls)) == list(map(_way, second.calls))
        others = iter(second.calls)
        for call in first.calls:
            other = next(others, None)
            if other is None or _way(call) != _way(other):
                others, other = iter(()), call
            self._visit(call, other)
        if not is_same_way:
            return SampleMeeting(self.decision, (), ())
        met: list[str | None] = []
        per_sample = []
        for one, twin in zip(first.outputs, second.outputs, strict=True):
            shapes = ((), ()) if one is None or twin is None else (one.shape, twin.shape)
            met.append(None if one is None else self._of(one, shapes).met)
            per_sample.append(self._grows(shapes))
        return SampleMeeting(self.decision, tuple(met), tuple(per_sample))

    def _visit(self, call: TapedCall, other: TapedCall) -> None:
        operands = [self._of(*each) for each in _shapes(call.operands, other.operands)]
        if call.name in _BY_FIRST:
            operands = operands[:1]
        elif call.name in _BY_SHAPE:
            operands = operands[1:]
        elif call.name in _MADE:
            operands = []
        if not any(item.has_samples for item in operands):
            operands = []
        elif self.decision is None:
            self.decision = _decision(call, operands)
        met = next((item.met for item in operands if item.met), None)
        rows = frozenset[tuple[int, int]]().union(*(item.rows for item in operands))
        for tensor, shapes in _shapes(call.results, other.results):
            pairs = frozenset(zip(*shapes, strict=False))
            if operands and _selects(call):
                rows |= {pair for pair in pairs if pair[0] != pair[1]}
            is_per_sample = self._grows(shapes) or _selects(call) or bool(pairs & rows)
            where = met
            if call.name == "randperm" and self._grows(shapes):
                where = f"{call.location} draws an order of the samples (randperm)"
            if operands and call is not other and (not is_per_sample or self._mixes(call, shapes)):
                where = where or f"{call.location} brings samples together ({call.name})"
            self._set(tensor, _Followed(bool(operands), where, rows & pairs))
            if operands and tensor.number in _numbers(call.operands):  # changed in place
                self.changed[tensor.memory] = _Followed(True, where)

    def _of(self, tensor: Seen, shapes: _Pair) -> _Followed:
        found = self.known.get(tensor.number) or self.in_memory.get(tensor.memory)
        if found is None:  # a parameter, a constant, or what an extension returned
            found = _Followed(has_samples=self._grows(shapes))
        changed = self.changed.get(tensor.memory)
        if changed is None:
            return found
        return _Followed(True, found.met or changed.met, found.rows)

    def _set(self, tensor: Seen, known: _Followed) -> None:
        self.known[tensor.number] = self.in_memory[tensor.memory] = known

    def _mixes(self, call: TapedCall, shapes: _Pair) -> bool:
        """Whether a result that keeps the dimension of the samples has entries of several."""
        if self.of_graphs:
            return False
        dims = [dim for dim, sizes in enumerate(zip(*shapes, strict=False)) if self._goes(*sizes)]
        if len(dims) > 1:  # pairs of samples
            return True
        along = call.numbers[call.name == "roll" : None if call.name in ("roll", "flip") else 1]
        return call.name in _ALONG and any(
            dim % len(shapes[0]) in dims for dim in along or call.numbers or (-1,)
        )

    def _grows(self, shapes: _Pair) -> bool:
        """Whether a dimension goes with the number of samples."""
        return any(itertools.starmap(self._goes, zip(*shapes, strict=False)))

    def _goes(self, size: int, other: int) -> bool:
        return size != other and (self.of_graphs or size * self.other_num == other * self.num)


def _shapes(tensors: Sequence[Seen], others: Sequence[Seen]) -> Iterator[tuple[Seen, _Pair]]:
    """Tensors, each with its shapes for both numbers of samples."""
    for tensor, other in zip(tensors, others, strict=True):
        yield tensor, (tensor.shape, other.shape)


def _selects(call: TapedCall) -> bool:
    """Whether it returns rows of its argument, as many as the data say."""
    by_mask = call.name == "__getitem__" and call.has_mask
    return call.name in _SELECT or by_mask or (call.name == "where" and len(call.operands) == 1)


def _decision(call: TapedCall, operands: Sequence[_Followed]) -> str | None:
    """Why Python knows something of the data from then on, if it does."""
    if call.by_library or only_raises(call.location):
        return None
    if call.name in _DECIDE:
        return f"{call.location} decides by what is in the data"
    reads = call.name in _READ or (call.name in _SIZES and bool(operands[0].rows))
    reads |= any(item.has_samples for item in operands[len(operands) - call.num_bounds :])
    if reads or (call.name == "one_hot" and not any(number > 0 for number in call.numbers)):
        return f"{call.location} reads a number out of the data ({call.name})"
    return None
