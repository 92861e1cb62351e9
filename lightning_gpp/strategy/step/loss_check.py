"""Whether steps that run for every micro-batch add up to the step of one device.

They do if the loss is a mean over samples. On some mini-batches, those with new shapes, those of a
new kind (:mod:`~lightning_gpp.strategy.step.counted_entries`) and the 1st, 2nd, 4th, 8th and so on,
the step also runs on two neighbouring micro-batches together, each time
others, with the outputs that their forwards gave: its loss has to have the same gradients at these
outputs. Two need little more memory than one, which is what the schedule is there for. Gradients
tell more than values, which may be alike by chance or hide a small term behind a large one, and
each of their rows comes from the same arithmetic: they differ by a few roundings only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_gpp.capture.checks.check import is_autocast, is_tf32, of_other_sizes
from lightning_gpp.capture.values.structure import flatten
from lightning_gpp.common.torch_device import widened
from lightning_gpp.strategy.cutting.cutting import CannotJoinError, Dims, Values, join_values
from lightning_gpp.strategy.step.counted_entries import CountedEntries

_ROUNDINGS = 16
"""Units of the last place by which the same gradients may differ, relative to all of them: rows
that no other touches differed by none, and by up to 0.7 where the step multiplies with a matrix of
300 columns, as sums are ordered by the size of the batch; the rest is for wider ones."""

_COARSEST = 0.05
"""Whatever the precision (the units of bfloat16 are 0.8 %)."""

_MOST_SHAPES = 16
"""Mini-batches that are looked at for their shapes alone; a run may have new ones for ever."""

Gradients = list[Tensor | None]


class Cadence:
    """Which mini-batches are looked at, and which two micro-batches of them."""

    def __init__(self) -> None:
        self._num_batches = 0
        self._num_looks = 0
        self._shapes: set[tuple[torch.Size, ...]] = set()
        self._counted = CountedEntries()

    def pairs(self, batch: Any, sizes: Sequence[int]) -> list[int]:
        """Counts a mini-batch; the first of each two micro-batches of it that are looked at.

        Args:
            batch: the mini-batch.
            sizes: samples of each micro-batch.
        """
        pairs = self._counted.new_pairs(batch, sizes)
        if self._is_due(batch) and not pairs:
            pairs = [self._num_looks % (len(sizes) - 1)]
        self._num_looks += bool(pairs)
        return pairs

    def _is_due(self, batch: Any) -> bool:
        self._num_batches += 1
        is_power_of_two = self._num_batches & (self._num_batches - 1) == 0
        tensors = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes in self._shapes or len(self._shapes) == _MOST_SHAPES:
            return is_power_of_two
        self._shapes.add(shapes)
        return True


class CannotCompareError(BaseException):
    """Raised through the step on both micro-batches: it does not call the forward as they did."""


class OutputGradients:
    """The gradients of two neighbouring micro-batches' losses at the outputs of the forward.

    Args:
        dims: of the samples, for every output.
        sizes: samples of each micro-batch of the mini-batch.
        first: number of the first of the two.
    """

    def __init__(self, dims: Dims, sizes: Sequence[int], first: int) -> None:
        self._dims = dims
        self._first = first
        self._pair = list(sizes[first : first + 2])
        self.pair = (first, first + 1)
        self.cut = [sum(sizes[:first]), sum(self._pair), sum(sizes[first + 2 :])]
        """Samples of the mini-batch before the two, in them and after them."""
        self._outputs: list[Values] = []
        self._gradients: list[Gradients] = []
        self._used: set[str] = set()

    def take(self, microbatch: int, outputs: Values, loss: Tensor) -> None:
        """Notes those of a micro-batch, if it is one of the two.

        Args:
            microbatch: its number; they come in order.
            outputs: of its forward, which the loss was made of.
            loss: times the share of its samples in the mini-batch.
        """
        if microbatch - self._first in (0, 1):
            gradients = _gradients(loss, list(_tensors(outputs)))
            left = iter(gradients)
            for name, value in outputs.items():
                found = [next(left) for _ in _tensors({name: value})]
                if any(gradient is not None for gradient in found):
                    self._used.add(name)
            self._gradients.append(gradients)
            self._outputs.append({name: _leaves(value) for name, value in outputs.items()})

    @property
    def used(self) -> frozenset[str]:
        """The outputs that the losses were made of."""
        return frozenset(self._used)

    def _joined(self) -> Values:
        """The outputs of both; of those that no loss is made of, some are only the first's."""
        joined: dict[str, Any] = {}
        for name, value in self._outputs[0].items():
            column = [{name: outputs[name]} for outputs in self._outputs]
            try:
                joined |= join_values(column, self._dims, self._pair)
            except CannotJoinError:
                if name in self._used:
                    raise
                joined[name] = value
        return joined

    def is_random(self, loss_of: Callable[[Values], Tensor]) -> bool:
        """Whether the step on both differs from itself, as it draws numbers."""
        return _farthest(self._of_both(loss_of), self._of_both(loss_of)) > 1

    def difference(self, loss_of: Callable[[Values], Tensor]) -> float:
        """How far they are from those of the step on both, in tolerances; over 1 is too far.

        Args:
            loss_of: runs the step on the samples of both, given the outputs of their forward.

        Raises:
            CannotJoinError: an output is not one entry per sample.
        """
        return _farthest(self._gradients, self._of_both(loss_of))

    def _of_both(self, loss_of: Callable[[Values], Tensor]) -> list[Gradients]:
        """The gradients of the loss of both, at the outputs of each."""
        loss = loss_of(self._joined()) * (sum(self._pair) / sum(self.cut))
        pieces = [list(_tensors(outputs)) for outputs in self._outputs]
        found = iter(_gradients(loss, [tensor for piece in pieces for tensor in piece]))
        return [[next(found) for _ in piece] for piece in pieces]


def _leaves(value: Any) -> Any:
    """The value with its tensors cut off from what made them."""
    found, structure = flatten(value)
    return structure.unflatten(
        [
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in found
        ]
    )


def _tensors(outputs: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in outputs.values():
        yield from (leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor))


def _gradients(loss: Tensor, tensors: Sequence[Tensor]) -> Gradients:
    """Of the loss at each of the tensors, None where it has none."""
    wanted = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
    found: Gradients = [None] * len(tensors)
    if loss.requires_grad and wanted:
        inputs = [tensors[index] for index in wanted]
        gradients = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
        for index, gradient in zip(wanted, gradients, strict=True):
            found[index] = gradient
    return found


def _pair(mine: Tensor | None, theirs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Two gradients of which one may be missing, as that of something unused is."""
    if mine is None:
        assert theirs is not None
        return torch.zeros_like(theirs), theirs
    return mine, torch.zeros_like(mine) if theirs is None else theirs


def _farthest(mine: Sequence[Gradients], theirs: Sequence[Gradients]) -> float:
    """How far the gradients at any output differ, in tolerances."""
    columns = zip(zip(*mine, strict=True), zip(*theirs, strict=True), strict=True)
    return max((_distance(ours, others) for ours, others in columns), default=0.0)


def _is_shared(mine: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> bool:
    """Whether an output is the same for all pieces: the first stands for it in the whole."""
    return all(g is None for g in theirs[1:]) and any(g is not None for g in mine[1:])


def _distance(mine: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> float:
    """How far the gradients at an output's pieces differ, in tolerances."""
    pairs = [_pair(a, b) for a, b in zip(mine, theirs, strict=True) if a is not b]
    if _is_shared(mine, theirs):
        pairs = [
            (torch.stack([a for a, _ in pairs]).sum(0), torch.stack([b for _, b in pairs]).sum(0))
        ]
    if not pairs:
        return 0.0
    off = sum(float((widened(a) - widened(b)).square().sum()) for a, b in pairs) ** 0.5
    scale = sum(float(widened(b).square().sum()) for _, b in pairs) ** 0.5
    eps = torch.finfo(pairs[0][0].dtype).eps
    relative = min(_ROUNDINGS * eps, _COARSEST)
    if is_autocast():
        relative = _COARSEST
    elif is_tf32(pairs[0][0].device):
        relative = max(relative, of_other_sizes(pairs[0][0].device))
    tolerance = relative * scale
    return off / tolerance if tolerance else float("inf" if off else 0)
