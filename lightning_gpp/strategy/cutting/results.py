"""Joining what the user's step returned for the micro-batches of a mini-batch."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_gpp.common.host_copies import to_device

_PLAIN = (str, bytes, numbers.Number, type(None))


def combine_results(results: Sequence[Any], sizes: Sequence[int], place: str = "result") -> Any:
    """What the step would return for the whole mini-batch, gradients cut off.

    Tensors with one row per sample are concatenated; numbers and other tensors of floating point
    are averaged by samples; dicts are joined entry by entry; everything else must be equal.

    Args:
        results: of each micro-batch.
        sizes: samples of each.
        place: for the error text.

    Raises:
        ValueError: the results cannot be joined; the text says where.

    >>> combine_results([torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
    tensor(2.)
    """
    first = results[0]
    if len(results) == 1:
        return pytree.tree_map_only(Tensor, Tensor.detach, first)
    if isinstance(first, Mapping):
        if any(result.keys() != first.keys() for result in results):
            raise ValueError(f"{place}: the micro-batches returned different keys")
        return {
            key: combine_results([r[key] for r in results], sizes, f"{place}[{key!r}]")
            for key in first
        }
    if isinstance(first, Tensor):
        return _combine_tensors([result.detach() for result in results], sizes, place)
    if isinstance(first, _PLAIN) and all(result == first for result in results):
        return first
    if isinstance(first, numbers.Real):
        return sum(float(r) * n for r, n in zip(results, sizes, strict=True)) / sum(sizes)
    raise ValueError(
        f"{place}: {type(first).__name__} values of micro-batches cannot be joined; return tensors "
        "with one row per sample, or use num_microbatches=1 or schedule='gpipe'"
    )


def _combine_tensors(tensors: Sequence[Tensor], sizes: Sequence[int], place: str) -> Tensor:
    first = tensors[0]
    if first.dim() > 0 and all(t.shape[:1] == (n,) for t, n in zip(tensors, sizes, strict=True)):
        return torch.cat(list(tensors))
    if any(tensor.shape != first.shape for tensor in tensors):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(
            f"{place}: tensors of shapes {shapes} for micro-batches of {list(sizes)} samples "
            "cannot be joined; return one row per sample, or use num_microbatches=1"
        )
    stacked = torch.stack(list(tensors))
    if stacked.is_floating_point():
        return torch.where((stacked == first).all(0), first, mean_over_samples(stacked, sizes))
    if all(torch.equal(tensor, first) for tensor in tensors):
        return first
    return mean_over_samples(stacked, sizes)


def mean_over_samples(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """The mean of values of micro-batches; whole numbers have one of torch's default type.

    Added up in float32 at least: a float16 counts no further than to 65,504 samples, a bfloat16
    rounds beyond 256.

    Args:
        values: one row of each.
        sizes: samples of each.

    >>> mean_over_samples(torch.tensor([1.0, 4.0]).half(), [200_000, 100_000])
    tensor(2., dtype=torch.float16)
    """
    dtype = values.dtype if values.is_floating_point() else torch.get_default_dtype()
    wide = torch.promote_types(dtype, torch.float32)
    weights = to_device(torch.tensor(sizes, dtype=wide), values.device)
    weighted = values.to(wide) * weights.reshape(-1, *[1] * (values.dim() - 1))
    return (weighted.sum(0) / sum(sizes)).to(dtype)
