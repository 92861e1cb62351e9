"""Whether steps that run for every micro-batch add up to the step of one device.

They do if the loss is a mean over samples. On some mini-batches, those with new shapes, those of a
new kind (:class:`~lightning_gpp.strategy.step.cut_checks.CountedEntries`) and the 1st, 2nd, 4th,
8th and so on, the step also runs on two neighbouring micro-batches together, each time others, with
the outputs that their forwards gave: its loss has to have the same gradients at these outputs. Two
need little more memory than one, which is what the schedule is there for. Gradients tell more than
values, which may be alike by chance or hide a small term behind a large one, and each of their rows
comes from the same arithmetic: they differ by a few roundings only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.capture.checks.check import is_autocast, is_tf32, of_other_sizes
from lightning_gpp.capture.values.structure import map_tensors
from lightning_gpp.common.torch_device import widened
from lightning_gpp.runtime.payload import tensors_in
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

Gradients = Sequence[Tensor | None]


class Cadence:
    """Which mini-batches are looked at, and which two micro-batches of them."""

    def __init__(self) -> None:
        self._num_batches = self._num_looks = 0
        self._shapes: set[tuple[torch.Size, ...]] = set()
        self._counted = CountedEntries()

    def pairs(self, batch: Any, sizes: Sequence[int]) -> list[int]:
        """Counts a mini-batch; the first of each two micro-batches of it that are looked at.

        Args:
            batch: the mini-batch.
            sizes: samples of each micro-batch.
        """
        self._num_batches += 1
        pairs = self._counted.new_pairs(batch, sizes)
        shapes = tuple(tensor.shape for tensor in tensors_in([batch]))
        is_new = shapes not in self._shapes and len(self._shapes) < _MOST_SHAPES
        self._shapes |= {shapes} if is_new else set()
        is_power_of_two = self._num_batches & (self._num_batches - 1) == 0
        if (is_power_of_two or is_new) and not pairs:
            pairs = [self._num_looks % (len(sizes) - 1)]
        self._num_looks += bool(pairs)
        return pairs


class OutputGradients:
    """The gradients of two neighbouring micro-batches' losses at the outputs of the forward.

    Args:
        dims: of the samples, for every output.
        sizes: samples of each micro-batch of the mini-batch.
        first: number of the first of the two.
    """

    def __init__(self, dims: Dims, sizes: Sequence[int], first: int) -> None:
        self._dims, self._sizes, self._total = dims, list(sizes[first : first + 2]), sum(sizes)
        self.pair = (first, first + 1)
        start = sum(sizes[:first])
        self.samples = slice(start, start + sum(self._sizes))
        """Those of the two."""
        self._outputs: list[dict[str, Any]] = []
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
            self._outputs.append(map_tensors(dict(outputs), _leaf))

    @property
    def used(self) -> frozenset[str]:
        """The outputs that the losses were made of."""
        return frozenset(
            name
            for found in self._gradients
            for (name, _), gradient in zip(self._places(), found, strict=True)
            if gradient is not None
        )

    def _places(self) -> list[tuple[str, int | None]]:
        """For every tensor of the outputs the name of its output, and the dimension of samples."""
        return [
            (name, dim)
            for name, value in self._outputs[0].items()
            for _, dim in zip(tensors_in([value]), chain(self._dims.get(name, ()), repeat(None)))
        ]

    def is_off(self, loss_of: Callable[[Values], Tensor]) -> bool:
        """Whether they differ from those of the step on both by more than rounding.

        Args:
            loss_of: runs the step on the samples of both, given the outputs of their forward.

        Raises:
            CannotJoinError: an output is not one entry per sample.
        """
        joined: dict[str, Any] = {}
        for name, value in self._outputs[0].items():
            column = [{name: outputs[name]} for outputs in self._outputs]
            try:
                joined |= join_values(column, self._dims, self._sizes)
            except CannotJoinError:
                if name in self.used:
                    raise
                joined[name] = value  # no loss is made of it
        loss = loss_of(joined) * (sum(self._sizes) / self._total)
        theirs = [_gradients(loss, outputs) for outputs in self._outputs]
        tensors = [tensors_in(list(outputs.values())) for outputs in self._outputs]
        columns = [zip(*each, strict=True) for each in (tensors, self._gradients, theirs)]
        for (_, dim), both, *gradients in zip(self._places(), *columns, strict=True):
            flat = [list(map(_flat, found, both)) for found in gradients]
            # Of an output that both have whole the sum counts.
            mine, others = (each[0] + each[1] if dim is None else torch.cat(each) for each in flat)
            if _differ(mine, others, both[0].dtype):
                return True
        return False


def each_apart(outputs: Values) -> Values:
    """The same; the gradient at one does not come through another that was made of it."""
    apart: Values = map_tensors(dict(outputs), lambda tensor: tensor.view_as(tensor))
    return apart


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _gradients(loss: Tensor, outputs: Values) -> Gradients:
    """Of the loss at every tensor of some outputs; None where it has none."""
    tensors = tensors_in(list(outputs.values()))
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    found: Gradients = [None] * len(wanted)
    if loss.requires_grad and wanted:
        found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    left = iter(found)
    return [next(left) if tensor.requires_grad else None for tensor in tensors]


def _flat(gradient: Tensor | None, tensor: Tensor) -> Tensor:
    """The gradient at a tensor in a row; one that is missing, as of something unused, is zero."""
    found = torch.zeros_like(tensor) if gradient is None else gradient
    return widened(torch.view_as_real(found) if found.is_complex() else found).flatten()


def _differ(mine: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Whether gradients that are of a type differ by more than rounding."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return False
    relative = min(_ROUNDINGS * torch.finfo(dtype).eps, _COARSEST)
    if is_autocast():
        relative = _COARSEST
    elif is_tf32(mine.device):
        relative = max(relative, of_other_sizes(mine.device))
    return float((mine - theirs).norm()) > relative * float(theirs.norm())
