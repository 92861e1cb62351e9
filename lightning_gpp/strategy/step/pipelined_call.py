"""The pipelined forward as one node of the user's autograd graph.

Its forward runs the forward part of a program on all ranks and its backward the backward part, so
whatever the user makes of the outputs is differentiated by autograd as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.capture import CapturedModel
from lightning_gpp.capture.values.structure import Structure, flatten
from lightning_gpp.runtime.payload import tensors_in
from lightning_gpp.runtime.pieces import Slices, cut
from lightning_gpp.strategy.cutting.cutting import (
    Dims,
    Values,
    input_slices,
    join_values,
    pieces_of,
)
from lightning_gpp.strategy.torch_private import keeps_graph, will_reach

Column = Sequence[Tensor | None]


@dataclass(slots=True)
class CallBoundary:
    """Where one call of the forward meets the pipeline, on rank 0.

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
        pieces = pieces_of(inputs, slices, len(sizes))
        leaves = [
            {name: part.detach().requires_grad_(name in needs) for name, part in piece.items()}
            for piece in pieces
        ]
        return cls(leaves, sizes, slices, captured.graph.batch_dims)

    def start(self, microbatch: int) -> Mapping[str, Tensor]:
        """The arguments of a piece."""
        return self.pieces[microbatch]

    def finish(self, microbatch: int, outputs: Values) -> None:
        """Keeps its outputs; they come in order."""
        self.outputs.append(outputs)

    def output_gradients(self, microbatch: int) -> Mapping[str, Column]:
        """The gradients of its outputs."""
        return self.gradients[microbatch]

    def leave_only(self, names: Collection[str]) -> None:
        """Drops all outputs but these."""
        self.outputs = [{n: o[n] for n in o if n in names} for o in self.outputs]

    def take_outputs(self, *, averages: bool = False) -> Values:
        """The outputs of the whole batch, which nothing here keeps; see :func:`join_values`."""
        outputs, self.outputs = self.outputs, []
        return join_values(outputs, self.dims, self.sizes, averages=averages)

    def put_gradients(self, gradients: Mapping[str, Column]) -> None:
        """Takes the gradients of the whole batch's outputs, by name and tensor."""
        self.gradients = [{} for _ in self.sizes]
        for name, column in gradients.items():
            dims = [*self.dims.get(name, ()), *[None] * len(column)]
            cuts = [
                self._cut(gradient, dim, name)
                for gradient, dim in zip(column, dims[: len(column)], strict=True)
            ]
            for index, piece in enumerate(self.gradients):
                piece[name] = [parts[index] for parts in cuts]

    def _cut(self, gradient: Tensor | None, dim: int | None, name: str) -> Column:
        """Of an output that is the same for all pieces the first takes it all."""
        others = [None] * (len(self.sizes) - 1)
        if gradient is None or dim is None or not others:
            return [gradient, *others]
        return cut(gradient, self.sizes, dim, name)

    def take_input_gradients(self, name: str) -> Tensor | None:
        """The gradient of an argument, from those of its pieces."""
        leaves = [piece[name] for piece in self.pieces]
        parts = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return self.slices[name].joined(parts)


_TENSOR = object()
"""Stands for a tensor among the leaves of an output."""


@dataclass(frozen=True, slots=True)
class _Form:
    """An output without its tensors."""

    structure: Structure
    leaves: list[Any]
    num_tensors: int

    @classmethod
    def of(cls, value: Any) -> tuple[_Form, list[Tensor]]:
        """The form of an output, and its tensors."""
        leaves, structure = flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return cls(structure, others, len(tensors)), tensors

    def filled(self, tensors: Iterator[Tensor]) -> Any:
        """The output with the next of the tensors."""
        return self.structure.unflatten(
            [next(tensors) if leaf is _TENSOR else leaf for leaf in self.leaves]
        )


@dataclass(slots=True)
class PipelinedCall:
    """One differentiable call of the pipelined forward.

    Attributes:
        boundary: its arguments and outputs.
        names: of the arguments, in the order in which autograd has them.
        run_forward: runs the forward part on all ranks.
        run_backward: runs the backward part on all ranks: (retain, hands out).
        forms: of the outputs, once there are any.
        anchor: stands for the parameters in the user's autograd graph.
    """

    boundary: CallBoundary
    names: tuple[str, ...]
    run_forward: Callable[[], None]
    run_backward: Callable[[bool, bool], None]
    forms: dict[str, _Form] = field(default_factory=dict)
    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))

    def __call__(self, inputs: Mapping[str, Tensor]) -> Values:
        """The outputs by name, for the arguments by name."""
        arguments = [inputs[name] for name in self.names]
        tensors = iter(_Node.apply(self, self.anchor, *arguments))  # type: ignore[no-untyped-call]
        return {name: form.filled(tensors) for name, form in self.forms.items()}

    def outputs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Runs the forward; the tensors of the outputs, and those that take no gradient."""
        self.run_forward()
        first = self.boundary.outputs[0]
        flags = [tensor.requires_grad for tensor in tensors_in(list(first.values()))]
        tensors: list[Tensor] = []
        with torch.no_grad():
            values = self.boundary.take_outputs()
        for name, value in values.items():
            self.forms[name], found = _Form.of(value)
            tensors += [tensor.detach() for tensor in found]
        return tensors, [t for t, flag in zip(tensors, flags, strict=True) if not flag]

    def differentiate(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Runs the backward; the gradients of the arguments.

        Raises:
            RuntimeError: second derivatives were asked for, or the forward is gone.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True asks for second derivatives, which a pipelined forward does not "
                "have: its backward runs on other ranks. Compute a gradient penalty on a module "
                "that is not pipelined, or train it on one device."
            )
        given = iter(gradients)
        self.boundary.put_gradients(
            {n: [next(given) for _ in range(form.num_tensors)] for n, form in self.forms.items()}
        )
        self.run_backward(keeps_graph(), will_reach(self.anchor))
        return [
            self.boundary.take_input_gradients(name)
            if self.boundary.pieces[0][name].requires_grad
            else None
            for name in self.names
        ]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: PipelinedCall, anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        tensors, constant = call.outputs()
        ctx.mark_non_differentiable(*constant)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.call.differentiate(gradients))
