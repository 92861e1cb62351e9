"""Operators that do more on a device than being called on its parts (:class:`~.program.Option`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_gpp.spmd.placement import R_SAME, Placement
from lightning_gpp.spmd.program import Computation
from lightning_gpp.spmd.run.collectives import Shape
from lightning_gpp.spmd.run.moves import Mover

Run = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


def mean_of_part(run: Run, part: Tensor, whole: Shape) -> Tensor:
    """A device's summand of a mean over a sharded dimension.

    Args:
        run: the operator.
        part: of the input.
        whole: sizes of the whole input.
    """
    (mean,) = run([part])
    return mean * (part.numel() / prod(whole))


def look_up_rows(weight: Tensor, indices: Tensor, first: int, arguments: dict[str, Any]) -> Tensor:
    """A device's summand of look-ups in a table of which it has rows from ``first`` on.

    Rows of other devices count as zeros.

    Raises:
        NotImplementedError: gradients are scaled by how often a row was looked up.
    """
    if arguments.get("scale_grad_by_freq") or arguments.get("sparse"):
        raise NotImplementedError("look-ups in a table divided by rows: plain gradients only")
    num_rows = weight.shape[0]
    is_here = (indices >= first) & (indices < first + num_rows)
    local = torch.where(is_here, indices - first, torch.zeros_like(indices))
    padding = int(arguments.get("padding_idx", -1)) - first
    rows = F.embedding(local, weight, padding if 0 <= padding < num_rows else None)
    # A row that stands in for one of another device gets a gradient of zeros.
    return torch.where(is_here.unsqueeze(-1), rows, torch.zeros((), dtype=rows.dtype))


class _SufficientFactors(torch.autograd.Function):
    """A linear layer whose weight's gradient comes from gathered factors, not from a sum."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Run,
        gather_input: Callable[[Tensor], Tensor],
        gather_gradient: Callable[[Tensor], Tensor],
        is_transposed: bool,
        part: Tensor,
        weight: Tensor,
        *bias: Tensor,
    ) -> Tensor:
        ctx.gathers = gather_input, gather_gradient
        ctx.is_transposed = is_transposed
        ctx.bias = [each.shape for each in bias]
        ctx.save_for_backward(part, weight)
        return run([part, weight, *bias])[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        (gradient,) = gradients
        of_part = of_weight = None
        if ctx.needs_input_grad[4]:
            of_part = gradient.matmul(weight if ctx.is_transposed else weight.t())
        gather_input, gather_gradient = ctx.gathers
        whole_gradient = gather_gradient(gradient)
        whole_gradient = whole_gradient.reshape(-1, whole_gradient.shape[-1])
        if ctx.needs_input_grad[5]:
            whole = gather_input(part)
            whole = whole.reshape(-1, whole.shape[-1])
            of_weight = (
                whole_gradient.t().mm(whole) if ctx.is_transposed else whole.t().mm(whole_gradient)
            )
        of_bias = [whole_gradient.sum(0).reshape(shape) for shape in ctx.bias]
        return None, None, None, None, of_part, of_weight, *of_bias


def sufficient_factors(
    mover: Mover,
    computation: Computation,
    run: Run,
    roles: Sequence[str],
    tensors: Sequence[Tensor],
    shapes: Sequence[Shape],
    result: tuple[Shape, Placement],
) -> Tensor:
    """The result of a linear layer or product, with gathered factors backwards.

    Args:
        mover: gathers them.
        computation: the instruction.
        run: the operator on tensors in the order of ``roles``.
        roles: what each tensor is: argument names of ``linear``, ``mm`` or ``addmm``.
        tensors: this device's parts.
        shapes: of the whole tensors.
        result: sizes of the whole result, and its placement.

    Raises:
        NotImplementedError: the operator is another one.
    """
    forms = {
        ("input", "weight"): (0, 1, None, True),
        ("input", "weight", "bias"): (0, 1, 2, True),
        ("self", "mat2"): (0, 1, None, False),
        ("self", "other"): (0, 1, None, False),
        ("self", "mat1", "mat2"): (1, 2, 0, False),
    }
    if tuple(roles) not in forms or len(shapes[forms[tuple(roles)][1]]) != 2:
        raise NotImplementedError(f"sufficient factors of {computation.operator!r}: {roles}")
    part, weight, bias, is_transposed = forms[tuple(roles)]
    order = [part, weight] if bias is None else [part, weight, bias]

    def in_order(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        back = dict(zip(order, given, strict=True))
        return run([back[index] for index in range(len(given))])

    def gather(whole: Shape, source: Placement, what: str) -> Callable[[Tensor], Tensor]:
        purpose = f"{what} of {computation.operator}"
        method = computation.method
        return lambda tensor: mover.move(tensor, whole, source, R_SAME, method, purpose)

    found: Tensor = _SufficientFactors.apply(  # type: ignore[no-untyped-call]
        in_order,
        gather(shapes[part], computation.inputs[part], "input"),
        gather(*result, "gradient"),
        is_transposed,
        *[tensors[index] for index in order],
    )
    return found
