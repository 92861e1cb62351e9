"""One call of the pipelined forward, as a rank keeps it, and its interface to the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_gpp.capture import CapturedModel
from lightning_gpp.runtime.gradients import GradientStash
from lightning_gpp.runtime.pieces import Slices, cut
from lightning_gpp.strategy.cutting.cutting import (
    Dims,
    Values,
    input_slices,
    join_values,
    pieces_of,
)

Column = Sequence[Tensor | None]


class Halves(Protocol):
    """Something that runs in a forward and a backward half."""

    def forward_half(self) -> None:
        """Everything before the loss."""

    def backward_half(self, *, retain: bool) -> None:
        """Everything after it."""


@dataclass(slots=True)
class RankCall:
    """What a rank keeps of a call until its last backward.

    Attributes:
        run: of the program.
        stash: keeps gradients apart that parameters have already.
        part: what each half runs in; whether it is the backward one.
    """

    run: Halves
    stash: GradientStash
    part: Callable[[Any, bool], AbstractContextManager[None]]

    def forward(self) -> None:
        """Runs all forwards."""
        with torch.enable_grad(), self.part(self.run, False):
            self.run.forward_half()

    def backward(self, *, retain: bool, hands_out: bool) -> None:
        """Runs all backwards.

        Args:
            retain: whether they can be run again.
            hands_out: whether the parameters get their gradients.
        """
        with self.stash, torch.enable_grad(), self.part(self.run, True):
            self.run.backward_half(retain=retain)
        if hands_out:
            self.stash.hand_out()
        else:
            self.stash.discard()


@dataclass(slots=True)
class CallBoundary:
    """The interface between one call of the forward and the pipeline, on rank 0.

    Attributes:
        pieces: the arguments of each piece of the batch by name, leaves of the stages' autograd.
        sizes: samples of each piece.
        slices: how the arguments were cut.
        dims: of the samples, for every output.
        outputs: of each piece.
        gradients: of the outputs of each piece, once a backward has come.
    """

    pieces: list[dict[str, Tensor]]
    sizes: Sequence[int]
    slices: Mapping[str, Slices]
    dims: Dims
    outputs: list[Values] = field(default_factory=list)
    gradients: list[dict[str, Column]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        captured: CapturedModel,
        inputs: Mapping[str, Tensor],
        sizes: Sequence[int],
        needs: frozenset[str] = frozenset(),
    ) -> CallBoundary:
        """The boundary of a call that can be cut.

        Args:
            captured: the forward.
            inputs: its arguments by name.
            sizes: samples of each piece.
            needs: arguments that need a gradient.
        """
        slices = input_slices(captured, inputs, sizes)
        assert slices is not None, "asked for when the number of pieces was chosen"
        detached = {name: tensor.detach() for name, tensor in inputs.items()}
        pieces = pieces_of(detached, slices, len(sizes))
        for piece in pieces:
            for name in needs:
                piece[name] = piece[name].detach().requires_grad_()
        return cls(pieces, sizes, slices, captured.graph.batch_dims)

    def start(self, microbatch: int) -> Mapping[str, Tensor]:
        """The arguments of a piece."""
        return self.pieces[microbatch]

    def finish(self, microbatch: int, outputs: Values) -> None:
        """Keeps its outputs; they come in order."""
        self.outputs.append(outputs)

    def output_gradients(self, microbatch: int) -> Mapping[str, Column]:
        """The gradients of its outputs."""
        return self.gradients[microbatch]

    def take_outputs(self, *, averages: bool = False) -> Values:
        """The outputs of the whole batch, which nothing here keeps; see :func:`join_values`."""
        outputs, self.outputs = self.outputs, []
        return join_values(outputs, self.dims, self.sizes, averages=averages)

    def put_gradients(self, gradients: Mapping[str, Column]) -> None:
        """Takes the gradients of the whole batch's outputs, by name and tensor."""
        self.gradients = [{} for _ in self.sizes]
        for name, column in gradients.items():
            dims = chain(self.dims.get(name, ()), repeat(None))
            cuts = [self._cut(each, dim, name) for each, dim in zip(column, dims, strict=False)]
            parts: Iterable[Column] = zip(*cuts, strict=True) if cuts else repeat(())
            for piece, part in zip(self.gradients, parts, strict=False):
                piece[name] = part

    def _cut(self, gradient: Tensor | None, dim: int | None, name: str) -> Column:
        """Of an output that is the same for all pieces the first takes it all."""
        if gradient is None or dim is None:
            return [gradient, *[None] * (len(self.sizes) - 1)]
        return cut(gradient, self.sizes, dim, name)

    def take_input_gradients(self, name: str) -> Tensor | None:
        """The gradient of an argument, from those of its pieces."""
        leaves = [piece[name] for piece in self.pieces]
        parts = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return self.slices[name].joined(parts)
