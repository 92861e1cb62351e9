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
    """Number of samples: the first dimension of the first tensor in the batch.

    Raises:
        ValueError: there is no tensor with samples, or others disagree; the text names the places.
        TypeError: the batch holds something that cannot be cut.
    """
    size = _first_size(batch)
    if size is None:
        raise ValueError("the batch holds no tensor with samples, so it cannot be cut")

    def check(tensor: Tensor, place: str) -> Tensor:
        if tensor.dim() > 0 and tensor.shape[0] != size:
            raise ValueError(
                "the tensors of a batch must agree in their first dimension to be cut into "
                f"micro-batches: {place} has {tensor.shape[0]}, the first tensor has {size}. Let "
                "the collate function put samples first, and keep what is not per sample out of "
                "the batch."
            )
        return tensor

    _walk(batch, "batch", size, check, lambda items: items)
    return size


def size_or_none(batch: Any) -> int | None:
    """Number of samples of a batch that can be cut; None of another one."""
    try:
        return batch_size(batch)
    except (TypeError, ValueError):
        return None


def copy_tensors(batch: Any) -> Any:
    """A batch whose tensors are copies that autograd can work on.

    Tensors made in inference mode, as Lightning's validation loops make them, cannot.
    """
    with torch.inference_mode(False):
        return _walk(batch, "batch", None, lambda tensor, _: tensor.clone(), lambda items: items)


def microbatch_sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """Samples per micro-batch, as equal as possible, the larger ones first.

    >>> microbatch_sizes(10, 4)
    [3, 3, 2, 2]
    """
    small, extra = divmod(num_samples, num_microbatches)
    return [small + (index < extra) for index in range(num_microbatches)]


def default_microbatches(num_devices: int) -> int:
    """Micro-batches where the user gives no number: enough to fill the pipeline.

    Twice the number of devices; one where there is no pipeline to fill, as every cut costs time.
    """
    return 2 * num_devices if num_devices > 1 else 1


def unit_sizes(num_samples: int, *, full: int, asked: int, at_a_time: int) -> list[int]:
    """Samples of each of the smallest micro-batches of one mini-batch.

    A full mini-batch is cut into as many as asked; a smaller one, such as the last of an epoch,
    into fewer of about the same size.

    Args:
        num_samples: of this mini-batch.
        full: of a full one; at least ``num_samples``.
        asked: micro-batches of a full one.
        at_a_time: the number must be a multiple of this, the most that a stage takes at a time.

    Raises:
        ValueError: there are fewer samples than that.

    >>> unit_sizes(8, full=8, asked=4, at_a_time=1), unit_sizes(5, full=8, asked=4, at_a_time=1)
    ([2, 2, 2, 2], [2, 2, 1])
    """
    count = min(asked, num_samples, -(-num_samples // max(1, full // asked)))
    count = max(count, min(at_a_time, num_samples))
    if count < at_a_time:
        raise ValueError(
            f"a mini-batch of {num_samples} samples is smaller than the {at_a_time} micro-batches "
            "that a stage of the plan takes at a time; drop small last batches (drop_last=True)"
        )
    return microbatch_sizes(num_samples, count - count % at_a_time)


def cut_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cuts a batch into consecutive micro-batches of the given sizes.

    Tensors are cut along their first dimension. Lists with one item per sample are cut too: lists
    of that length, unless their items are themselves batched tensors (a list of fields). Tensors
    without dimensions and other plain data go into every micro-batch.

    Shapes:
        - every tensor: ``(sum(sizes), ...)`` or ``()``
    """
    if len(sizes) == 1:
        return [batch]
    starts = [0, *itertools.accumulate(sizes)]
    return [_part(batch, slice(a, b), starts[-1]) for a, b in itertools.pairwise(starts)]


def _part(batch: Any, part: slice, total: int) -> Any:
    def cut_tensor(tensor: Tensor, place: str) -> Tensor:
        return tensor[part] if tensor.dim() else tensor

    return _walk(batch, "batch", total, cut_tensor, lambda items: items[part])


def _walk(
    item: Any,
    place: str,
    num_samples: int | None,
    on_tensor: Callable[[Tensor, str], Any],
    on_samples: Callable[[Sequence[Any]], Any],
) -> Any:
    """Rebuilds a nested batch with its tensors and its lists of samples replaced."""

    def walk(inner: Any, where: str) -> Any:
        return _walk(inner, f"{place}{where}", num_samples, on_tensor, on_samples)

    if isinstance(item, Tensor):
        return on_tensor(item, place)
    if isinstance(item, _PLAIN):
        return item
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        fields = [part.name for part in dataclasses.fields(item) if part.init]
        return dataclasses.replace(item, **{n: walk(getattr(item, n), f".{n}") for n in fields})
    if isinstance(item, Mapping):
        parts = {key: walk(part, f"[{key!r}]") for key, part in item.items()}
        return parts if type(item) is dict else type(item)(parts)  # type: ignore[call-arg]
    if isinstance(item, list | tuple):
        if num_samples is not None and _is_per_sample(item, num_samples):
            return on_samples(item)
        walked = [walk(part, f"[{index}]") for index, part in enumerate(item)]
        return type(item)(*walked) if hasattr(item, "_fields") else type(item)(walked)
    raise TypeError(
        f"{place} is a {type(item).__name__}, which cannot be cut into micro-batches; expected "
        "tensors in dicts, lists, tuples or dataclasses. Let the collate function return those."
    )


def _is_per_sample(items: Sequence[Any], num_samples: int) -> bool:
    """Whether a list holds one item per sample, and is no list of batched fields."""
    if len(items) != num_samples or hasattr(items, "_fields"):
        return False
    sizes = {_first_size(part) for part in items}
    return not (num_samples in sizes and sizes <= {num_samples, None})


def _first_size(item: Any) -> int | None:
    """First dimension of the first tensor in something; None where there is none."""
    if isinstance(item, Tensor):
        return item.shape[0] if item.dim() > 0 else None
    parts: Sequence[Any] = ()
    if isinstance(item, Mapping):
        parts = list(item.values())
    elif isinstance(item, list | tuple):
        parts = item
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        parts = [getattr(item, part.name) for part in dataclasses.fields(item) if part.init]
    return next((size for part in parts if (size := _first_size(part)) is not None), None)
