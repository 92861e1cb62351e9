"""Gradients of parameters that lie in files: a check of a large model has no room for several.

A graph nearly always gives the module's gradients to the bit. So a digest of each is compared
first, and only where one differs are gradients computed again and kept, in files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_gpp.common.mapped_tensor import is_mapped, mapped


@dataclass(frozen=True, slots=True)
class Digest:
    """Equal for tensors of the same type, shape and bits.

    Attributes:
        dtype: of the tensor.
        shape: likewise.
        parts: of what a backward added up, one after another: nearly always one.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[bytes, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Digest:
        """Of a dense tensor on the CPU."""
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        part = hashlib.sha256(data).digest()
        return cls(tensor.dtype, tuple(tensor.shape), (part,))


@contextmanager
def large_gradients(module: nn.Module, *, keeps: bool) -> Iterator[dict[Tensor, Digest]]:
    """What becomes of gradients of parameters in files as soon as a backward has made them.

    Args:
        module: whose parameters.
        keeps: whether they are kept, in files; otherwise a digest remains of them, in what this
            gives.
    """
    digests: dict[Tensor, Digest] = {}

    def take(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        if keeps:
            parameter.grad = mapped(gradient)
            return
        found, before = Digest.of(gradient), digests.get(parameter)
        parts = () if before is None else before.parts
        digests[parameter] = Digest(found.dtype, found.shape, (*parts, *found.parts))
        parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
        for parameter in module.parameters()
        if parameter.requires_grad and is_mapped(parameter)
    ]
    try:
        yield digests
    finally:
        for handle in handles:
            handle.remove()
