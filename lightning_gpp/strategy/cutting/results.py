"""Joining what the user's step returned for the micro-batches of a mini-batch."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_gpp.common.host_copies import to_device


def combine_results(results: Sequence[Any], sizes: Sequence[int], place: str = "result") -> Any:
    """What the step would return for the whole mini-batch, gradients cut off.

    What holds one entry per sample (tensors and arrays by their first dimension, lists by their
    length) is concatenated; numbers and other tensors of floating point are averaged by samples;
    dicts, tuples and other lists are joined item by item; everything else must be equal.

    Args:
        results: of each micro-batch.
        sizes: samples of each.
        place: for the error text.

    Raises:
        ValueError: the results cannot be joined; the text says where.

    >>> combine_results([torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
    tensor(2.)
    >>> combine_results([{"ids": ["a", "b"]}, {"ids": ["c"]}], [2, 1])
    {'ids': ['a', 'b', 'c']}
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
    if isinstance(first, np.ndarray):
        if first.ndim == 0:
            return np.asarray(combine_results([r.item() for r in results], sizes, place))
        if [len(result) for result in results] == [*sizes]:
            return np.concatenate(results)
        return _combine_tensors([torch.as_tensor(r) for r in results], sizes, place).numpy()
    if isinstance(first, list) and _are_per_sample(results, sizes):
        return [item for result in results for item in result]
    if isinstance(first, list | tuple):
        if any(len(result) != len(first) for result in results):
            raise ValueError(f"{place}: lists of different lengths that are not the samples'")
        joined = [
            combine_results(list(items), sizes, f"{place}[{index}]")
            for index, items in enumerate(zip(*results, strict=True))
        ]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    if all(result == first for result in results):
        return first
    if isinstance(first, numbers.Real):
        plain = [r.item() if isinstance(r, np.generic) else r for r in results]
        mean = sum(r * n for r, n in zip(plain, sizes, strict=True)) / sum(sizes)
        return type(first)(mean) if isinstance(first, np.floating) else mean
    raise ValueError(
        f"{place}: {type(first).__name__} values differ between micro-batches and cannot be "
        "joined; return tensors or lists with one entry per sample, or use num_microbatches=1"
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


def _are_per_sample(results: Sequence[list[Any]], sizes: Sequence[int]) -> bool:
    if any(len(result) != size for result, size in zip(results, sizes, strict=True)):
        return False
    return not all(  # a list of fields that happens to have as many as there are samples
        isinstance(item, Tensor) and item.dim() > 0 and item.shape[0] == size
        for result, size in zip(results, sizes, strict=True)
        for item in result
    )
