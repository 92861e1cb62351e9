"""A backward that meets other weights than its forward ran with.

PipeOptim's forwards run with predicted weights, and its backwards with those of the moment (section
3 of arXiv 2312.00839), so that no more than two versions are alive. Autograd would keep those of
the forward. So what it saves of a weight is replaced by a note of which weight it was, and how it
was looked at; when the backward asks for it, it gets the same part of the weight that is current
then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Noted:
    """A weight, or a view of one, that autograd would have kept."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@contextlib.contextmanager
def meeting(
    weights: Mapping[str, Tensor], met: Callable[[str], Tensor], *, are_others: bool = True
) -> Iterator[None]:
    """Forwards in the body save which weights they used instead of the weights.

    Args:
        weights: that they run with, by name; of strided layout and memory of their own.
        met: gives the weight that a backward is to meet, asked when it runs.
        are_others: whether these are others than the forward runs with.

    Raises:
        NotImplementedError: the forward computes in half precision with weights of another type
            (autocast), so that the backward would meet casts of them.
    """
    # What autograd keeps of the hooks must not keep the weights.
    known = {_memory(w): (name, w.dtype, int(w.storage_offset())) for name, w in weights.items()}
    dtypes = {weight.dtype for weight in weights.values()}
    strides = {name: weight.stride() for name, weight in weights.items()}

    def pack(tensor: Tensor) -> Any:
        if are_others and tensor.dtype in _HALF and tensor.dtype not in dtypes:
            raise NotImplementedError(_CASTS)
        found = known.get(_memory(tensor)) if tensor.layout is torch.strided else None
        if found is None or tensor.dtype != found[1]:
            return tensor
        offset = int(tensor.storage_offset()) - found[2]
        return _Noted(found[0], tuple(tensor.shape), tuple(tensor.stride()), offset)

    def unpack(saved: Any) -> Tensor:
        if not isinstance(saved, _Noted):
            assert isinstance(saved, Tensor)
            return saved
        current = met(saved.name).detach()
        assert current.stride() == strides[saved.name], "a weight is laid out as its prediction is"
        offset = int(current.storage_offset()) + saved.offset
        return torch.as_strided(current, saved.size, saved.stride, offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


_CASTS = (
    "the forward computes in half precision with weights of another type (autocast), so its "
    "backward would meet casts of those weights: use weights='stash', or true half precision"
)

_HALF = (torch.float16, torch.bfloat16)


def routed(value: Tensor, parameter: Tensor) -> Tensor:
    """A tensor with these values whose gradient goes to a parameter.

    Shapes:
        - value: that of the parameter
    """
    routed_: Tensor = _Routed.apply(parameter, value)  # type: ignore[no-untyped-call]
    return routed_


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
