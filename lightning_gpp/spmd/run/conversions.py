"""Changes of placement that autograd goes backward through.

A gradient lies as the dual of its value. So the backward of ``source -> target`` is the move
``target.dual -> source.dual``, and there is nothing more to know: what is gathered forwards is
reduced and scattered backwards, what is cut is padded, what is summed is left as it is.

Every device runs the same operations in the same order, and autograd goes backward in the reverse
of it (by sequence number), so devices meet at the same collective in the backward as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.spmd.placement import R_SUMMED
from lightning_gpp.spmd.program import Conversion, ReceiveInput, ReturnOutput, sums_in_buckets
from lightning_gpp.spmd.run.collectives import Shape
from lightning_gpp.spmd.run.gradient_sums import GradientSums
from lightning_gpp.spmd.run.moves import Mover

Local = Callable[[Tensor], Tensor]
Backward = Callable[[Tensor], Tensor | None]
"""None: no gradient goes on from here."""


class _Dual(torch.autograd.Function):
    """A function of one tensor with another one as its backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Local, backward: Backward) -> Tensor:
        ctx.back = backward
        result = forward(tensor)
        return result.view_as(result) if result is tensor else result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.back(gradients[0]), None, None


def dual(tensor: Tensor, forward: Local, backward: Backward) -> Tensor:
    """``forward(tensor)``, whose gradient goes back by ``backward``."""
    found: Tensor = _Dual.apply(tensor, forward, backward)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True, slots=True)
class Converter:
    """Converts values on one device.

    Attributes:
        mover: moves tensors.
        anchor: requires a gradient; stands for what rank 0 has and others do not.
        sums: of gradients of parameters.
    """

    mover: Mover
    anchor: Tensor
    sums: GradientSums

    def convert(self, tensor: Tensor, whole: Shape, conversion: Conversion) -> Tensor:
        """This device's part of a value in another placement."""
        source, target = conversion.source, conversion.target
        what = f"{conversion.value} {source} -> {target}"

        def forward(value: Tensor) -> Tensor:
            return self.mover.move(value, whole, source, target, conversion.method, what)

        def backward(gradient: Tensor) -> Tensor:
            return self.mover.move(
                gradient,
                whole,
                target.dual,
                source.dual,
                conversion.backward_method,
                f"gradient of {what}",
            )

        def add(gradient: Tensor) -> None:
            self.sums.add(tensor, gradient)

        if not tensor.requires_grad:
            return forward(tensor)
        if tensor.is_leaf and sums_in_buckets(conversion):
            # Nothing leads to the parameter, whose hooks would see a gradient of nothing.
            return dual(self.anchor, lambda _: tensor.detach(), add)
        return dual(tensor, forward, backward)

    def receive(
        self,
        tensor: Tensor | None,
        whole: Shape,
        dtype: torch.dtype,
        instruction: ReceiveInput,
        *,
        has_gradient: bool,
    ) -> Tensor:
        """This device's part of an argument of the forward, which rank 0 gives."""
        target = instruction.placement
        what = f"argument {instruction.value}, {target}"

        def forward(given: Tensor) -> Tensor:
            return self.mover.from_root(
                None if tensor is None else given, whole, dtype, target, what
            )

        def backward(gradient: Tensor) -> Tensor:
            found = self.mover.to_root(gradient, whole, target.dual, f"gradient of {what}")
            return torch.zeros_like(self.anchor) if found is None else found

        given = self.anchor if tensor is None else tensor
        return dual(given, forward, backward) if has_gradient else forward(given)

    def give_back(self, tensor: Tensor, whole: Shape, instruction: ReturnOutput) -> Tensor:
        """On rank 0 a result of the forward; elsewhere an empty tensor in its place.

        Backwards rank 0 has the gradient: a summand of ``R``, with zeros elsewhere.
        """
        source = instruction.placement
        what = f"result {instruction.value}, {source}"
        is_root = self.mover.collectives.rank == 0
        dtype, device = tensor.dtype, tensor.device

        def forward(value: Tensor) -> Tensor:
            found = self.mover.to_root(value, whole, source, what)
            return value.new_zeros(0) if found is None else found

        def backward(gradient: Tensor) -> Tensor:
            if source == R_SUMMED:
                return gradient if is_root else torch.zeros(whole, dtype=dtype, device=device)
            given = gradient if is_root else None
            return self.mover.from_root(given, whole, dtype, source.dual, f"gradient of {what}")

        return dual(tensor, forward, backward) if tensor.requires_grad else forward(tensor)
