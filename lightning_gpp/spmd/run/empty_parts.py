"""Operators on a device that has no rows of what is dealt.

Not all operators take empty tensors (a convolution without channels): what is empty is made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

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
        device = tensors[0].device
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
    weight = operator.input("weight")
    if not operator.kind.startswith("conv") or weight is None:
        return None
    if tensors[operator.inputs.index(weight)].numel():
        return None
    (shape,) = shapes  # a sum over no channels: zeros, and this device's summand of the bias
    made = torch.zeros(shape, dtype=dtypes[0], device=tensors[0].device)
    bias = operator.input("bias")
    if bias is not None:
        part = tensors[operator.inputs.index(bias)]
        made = made + part.reshape(-1, *[1] * (len(shape) - 2))
    return (made,)
