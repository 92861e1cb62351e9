"""Cutting a mini-batch, as the data loader gives it, into micro-batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_PLAIN = (str, bytes, int, float, bool, complex, type(None))


def batch_size(batch: Any) -> int:
    """Number of samples: the first dimension of the tensors in the batch.

    Raises:
        ValueError: there is no tensor, or tensors disagree; the text names the places.
    """
    sizes: dict[int, str] = {}

    def see(tensor: Tensor, place: str) -> Tensor:
        if tensor.dim() > 0:
            sizes.setdefault(tensor.shape[0], place)
        return tensor

    _walk(batch, "batch", see, lambda items, place: items)
    if not sizes:
        raise ValueError("the batch holds no tensor with samples, so it cannot be cut")
    if len(sizes) > 1:
        places = ", ".join(f"{place} has {size}" for size, place in sizes.items())
        raise ValueError(
            f"the tensors of a batch must agree in their first dimension to be cut into "
            f"micro-batches: {places}. Let the collate function put samples first, and keep what "
            "is not per sample out of the batch."
        )
    return next(iter(sizes))


def copy_tensors(batch: Any) -> Any:
    """A batch whose tensors are copies that autograd can work on.

    Tensors made in inference mode, as Lightning's validation loops make them, cannot.
    """
    with torch.inference_mode(False):
        return _walk(batch, "batch", lambda tensor, _: tensor.clone(), lambda items, _: items)


def microbatch_sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """Samples per micro-batch, as equal as possible, the larger ones first.

    >>> microbatch_sizes(10, 4)
    [3, 3, 2, 2]
    """
    small, extra = divmod(num_samples, num_microbatches)
    return [small + (index < extra) for index in range(num_microbatches)]


def cut_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cuts a batch into consecutive micro-batches of the given sizes.

    Tensors are cut along their first dimension, lists of plain items of that length too; tensors
    without dimensions and other plain data go into every micro-batch.

    Shapes:
        - every tensor: ``(sum(sizes), ...)`` or ``()``
    """
    if len(sizes) == 1:
        return [batch]
    starts = [0, *itertools.accumulate(sizes)]
    return [_part(batch, slice(a, b), starts[-1]) for a, b in itertools.pairwise(starts)]


def _part(batch: Any, part: slice, total: int) -> Any:
    def cut_list(items: Sequence[Any], place: str) -> Any:
        return items[part] if len(items) == total else items

    def cut_tensor(tensor: Tensor, place: str) -> Tensor:
        return tensor[part] if tensor.dim() else tensor

    return _walk(batch, "batch", cut_tensor, cut_list)


def _walk(
    item: Any,
    place: str,
    on_tensor: Callable[[Tensor, str], Any],
    on_list: Callable[[Sequence[Any], str], Any],
) -> Any:
    """Rebuilds a nested batch with tensors and lists of plain items replaced."""
    if isinstance(item, Tensor):
        return on_tensor(item, place)
    if isinstance(item, _PLAIN):
        return item
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        parts = {
            part.name: _walk(getattr(item, part.name), f"{place}.{part.name}", on_tensor, on_list)
            for part in dataclasses.fields(item)
            if part.init
        }
        return dataclasses.replace(item, **parts)
    if isinstance(item, Mapping):
        parts = {
            key: _walk(part, f"{place}[{key!r}]", on_tensor, on_list) for key, part in item.items()
        }
        return parts if type(item) is dict else type(item)(parts)  # type: ignore[call-arg]
    if isinstance(item, list | tuple):
        if item and all(isinstance(part, _PLAIN) for part in item):
            return on_list(item, place)
        walked = [
            _walk(part, f"{place}[{index}]", on_tensor, on_list) for index, part in enumerate(item)
        ]
        return type(item)(*walked) if hasattr(item, "_fields") else type(item)(walked)
    raise TypeError(
        f"{place} is a {type(item).__name__}, which cannot be cut into micro-batches; expected "
        "tensors in dicts, lists, tuples or dataclasses. Let the collate function return those."
    )
