"""Values that are shapes alone, so that models far larger than this machine can run.

Tensors are on torch's meta device: they have a type and a shape, and autograd runs on them, but
they hold no numbers. A stage makes outputs of the shapes that its graph has for the samples of the
micro-batch, which require gradients where the graph says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.graph import TensorSpec, Value, Variation

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Made:
    """Values in the making: their tensors, and how to put them together."""

    kinds: Sequence[Value]
    tensors: Sequence[Tensor]
    samples: int

    @classmethod
    def of(cls, kinds: Sequence[Value], samples: int, microbatch_size: int) -> Made:
        """Values for a number of samples."""
        specs = [spec for kind in kinds for spec in kind.tensors]
        return cls(kinds, [_tensor(spec, samples, microbatch_size) for spec in specs], samples)

    def values(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The values, made of these tensors."""
        rest = iter(tensors)
        return [self._value(kind, [next(rest) for _ in kind.tensors]) for kind in self.kinds]

    def _value(self, kind: Value, tensors: list[Tensor]) -> Any:
        if len(tensors) == 1:
            return tensors[0]
        if not tensors:
            return self.samples if kind.variation is Variation.COUNT else None
        return tuple(tensors)


class _Compute(torch.autograd.Function):
    """Joins tensors to what they are made from, forward and backward."""

    @staticmethod
    def forward(ctx: Any, made: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.likes = [(tensor.shape, tensor.dtype) for tensor in inputs]
        ctx.mark_non_differentiable(*[t for t in made if not _is_differentiable(t)])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        made = [torch.empty(shape, dtype=dtype, device=META) for shape, dtype in ctx.likes]
        return (None, *made)


def computed(made: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """New tensors as if they were computed from others."""
    found: Sequence[Tensor] = _Compute.apply(made, *inputs)  # type: ignore[no-untyped-call]
    return found


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def takes_gradient(leaf: Any) -> bool:
    """Whether something is a tensor that wants a gradient."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _tensor(spec: TensorSpec, samples: int, microbatch_size: int) -> Tensor:
    shape = list(spec.shape)
    if spec.batch_dim is not None:
        shape[spec.batch_dim] = shape[spec.batch_dim] * samples // microbatch_size
    return torch.empty(shape, dtype=getattr(torch, spec.dtype), device=META)
