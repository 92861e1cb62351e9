"""Whether steps that run for every micro-batch add up to the step of one device.

They do if the loss is a mean over samples. On some mini-batches, those with new shapes, those of a
new kind (:mod:`~lightning_gpp.strategy.step.cut_checks`) and the 1st, 2nd, 4th, 8th and so on,
the step also runs on two neighbouring micro-batches together, each time
others, with the outputs that their forwards gave: its loss has to have the same gradients at these
outputs. Two need little more memory than one, which is what the schedule is there for. Gradients
tell more than values, which may be alike by chance or hide a small term behind a large one, and
each of their rows comes from the same arithmetic: they differ by a few roundings only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_gpp.capture.checks.check import is_autocast, is_tf32, of_other_sizes
from lightning_gpp.capture.values.structure import flatten
from lightning_gpp.common.torch_device import widened
from lightning_gpp.runtime.payload import tensors_in
from lightning_gpp.runtime.pieces import Slices
from lightning_gpp.strategy.cutting.cutting import CannotJoinError, Dims, Values, join_values
from lightning_gpp.strategy.step.cut_checks import CountedEntries

_ROUNDINGS = 16
"""Units of the last place by which the same gradients may differ, relative to all of them: rows
that no other touches differed by none, and by up to 0.7 where the step multiplies with a matrix of
300 columns, as sums are ordered by the size of the batch; the rest is for wider ones."""

_COARSEST = 0.05
"""Whatever the precision (the units of bfloat16 are 0.8 %)."""

_MOST_SHAPES = 16
"""Mini-batches that are looked at for their shapes alone; a run may have new ones for ever."""

Gradients = dict[str, list[Tensor | None]]


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
        self._dims, self._sizes = dims, list(sizes[first : first + 2])
        self.pair = (first, first + 1)
        self.cut = [sum(sizes[:first]), sum(self._sizes), sum(sizes[first + 2 :])]
        """Samples of the mini-batch before the two, in them and after them."""
        self._outputs: list[Values] = []
        self._gradients: list[Gradients] = []

    def take(self, microbatch: int, outputs: Values, loss: Tensor) -> None:
        """Notes those of a micro-batch, if it is one of the two.

        Args:
            microbatch: its number; they come in order.
            outputs: of its forward, which the loss was made of.
            loss: times the share of its samples in the mini-batch.
        """
        if microbatch in self.pair:
            self._gradients.append(_gradients(loss, outputs))
            self._outputs.append({name: _leaves(value) for name, value in outputs.items()})

    @property
    def used(self) -> frozenset[str]:
        """The outputs that the losses were made of."""
        return frozenset(
            name
            for gradients in self._gradients
            for name, found in gradients.items()
            if any(gradient is not None for gradient in found)
        )

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
        theirs = self._of_both(loss_of)
        return _farthest(self._joined_gradients(), theirs)

    def _of_both(self, loss_of: Callable[[Values], Tensor]) -> Gradients:
        """The gradients of the step on both, at their joined outputs."""
        joined: dict[str, Any] = {}
        for name, value in self._outputs[0].items():
            column = [{name: outputs[name]} for outputs in self._outputs]
            try:
                joined |= join_values(column, self._dims, self._sizes)
            except CannotJoinError:
                if name in self.used:
                    raise
                joined[name] = value  # some that no loss is made of are only the first's
        return _gradients(loss_of(joined) * (sum(self._sizes) / sum(self.cut)), joined)

    def _joined_gradients(self) -> Gradients:
        """Those of the two; of an output that both have whole their sum."""
        joined: Gradients = {}
        for name, value in self._outputs[0].items():
            columns = zip(*(gradients[name] for gradients in self._gradients), strict=True)
            dims = itertools.chain(self._dims.get(name, ()), itertools.repeat(None))
            joined[name] = [
                _slices(tensor, dim, self._sizes).joined(column)
                for tensor, column, dim in zip(tensors_in([value]), columns, dims, strict=False)
            ]
        return joined


def each_apart(outputs: Values) -> Values:
    """The same; the gradient at one does not come through another that was made of it."""
    found, structure = flatten(dict(outputs))
    apart = [leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf for leaf in found]
    made: Values = structure.unflatten(apart)
    return made


def _slices(tensor: Tensor, dim: int | None, sizes: Sequence[int]) -> Slices:
    """How gradients of micro-batches of these sizes make up the whole; ``tensor``: the first."""
    if dim is None or tensor.dim() <= dim:
        return Slices(None)
    return Slices.of_samples(dim, tensor.shape[dim] // sizes[0], sizes)


def _leaves(value: Any) -> Any:
    """The value with its tensors cut off from what made them."""
    found, structure = flatten(value)
    return structure.unflatten(
        [
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in found
        ]
    )


def _gradients(loss: Tensor, outputs: Mapping[str, Any]) -> Gradients:
    """Of the loss at every tensor of some outputs; None where it has none."""
    tensors = {name: tensors_in([value]) for name, value in outputs.items()}
    wanted = [t for column in tensors.values() for t in column if t.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if loss.requires_grad and wanted:
        found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    left = iter(found)
    return {
        name: [next(left) if t.requires_grad else None for t in column]
        for name, column in tensors.items()
    }


def _farthest(mine: Gradients, theirs: Gradients) -> float:
    """How far the gradients at any output differ, in tolerances."""
    pairs = [pair for name in mine for pair in zip(mine[name], theirs[name], strict=True)]
    return max((_distance(*pair) for pair in pairs), default=0.0)


def _distance(mine: Tensor | None, theirs: Tensor | None) -> float:
    """A gradient that is missing, as that of something unused, is zero."""
    known = mine if theirs is None else theirs
    if known is None:
        return 0.0
    a, b = (torch.zeros_like(known) if each is None else each for each in (mine, theirs))
    off = float((widened(a) - widened(b)).square().sum()) ** 0.5
    scale = float(widened(b).square().sum()) ** 0.5
    relative = min(_ROUNDINGS * torch.finfo(known.dtype).eps, _COARSEST)
    if is_autocast():
        relative = _COARSEST
    elif is_tf32(known.device):
        relative = max(relative, of_other_sizes(known.device))
    tolerance = relative * scale
    return off / tolerance if tolerance else float("inf" if off else 0)
