"""Operators on a device that has no rows of what is dealt.

Not all operators take empty tensors (a convolution without channels), and some leave autograd's
graph for them (attention without samples). Then devices would differ in what they do backwards, and
wait for each other in vain. So what is empty is made here, with gradients of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.spmd.operator_graph import SpmdOperator
from lightning_gpp.spmd.run.collectives import Shape


def made_of_nothing(
    operator: SpmdOperator,
    tensors: Sequence[Tensor],
    shapes: Sequence[Shape],
    dtypes: Sequence[torch.dtype],
) -> tuple[Tensor, ...] | None:
    """A device's outputs where it has nothing to compute; None where it has something.

    Args:
        operator: that would make them.
        tensors: what it would read.
        shapes: of the outputs.
        dtypes: likewise.
    """
    if not tensors or not shapes:
        return None
    if all(prod(shape) == 0 for shape in shapes):
        return tuple(
            zeros_of(tensors, shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
        )
    weight = operator.input("weight")
    if not operator.kind.startswith("conv") or weight is None:
        return None
    if tensors[operator.inputs.index(weight)].numel():
        return None
    (shape,) = shapes  # a sum over no channels: zeros, and this device's summand of the bias
    made = zeros_of(tensors, shape, dtypes[0])
    bias = operator.input("bias")
    if bias is not None:
        part = tensors[operator.inputs.index(bias)]
        made = made + part.reshape(-1, *[1] * (len(shape) - 2))
    return (made,)


def reaching(made: tuple[Tensor, ...], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What an operator made; where it read nothing of a tensor, autograd still reaches that."""
    if not torch.is_grad_enabled() or all(tensor.numel() for tensor in tensors):
        return made
    read = [tensor for tensor in tensors if tensor.requires_grad]
    if not read:
        return made
    return tuple(
        each + zeros_of(read, tuple(each.shape), each.dtype) if each.is_floating_point() else each
        for each in made
    )


def zeros_of(tensors: Sequence[Tensor], shape: Shape, dtype: torch.dtype) -> Tensor:
    """Zeros that depend on tensors, which get gradients of zeros."""
    made: Tensor = _Zeros.apply(shape, dtype, *tensors)  # type: ignore[no-untyped-call]
    return made


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: Shape, dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        ctx.likes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        made = torch.zeros(shape, dtype=dtype, device=tensors[0].device)
        if not made.is_floating_point() and not made.is_complex():
            ctx.mark_non_differentiable(made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = [
            torch.zeros(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in zip(
                ctx.likes, ctx.needs_input_grad[2:], strict=True
            )
        ]
        return None, None, *found
