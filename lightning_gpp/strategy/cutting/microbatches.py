"""Cutting a mini-batch, as the data loader gives it, into micro-batches."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_gpp.strategy.cutting.graph_batches import (
    FULL_GRAPH,
    copy_graphs,
    cut_graphs,
    is_full_graph,
    is_graph,
    num_graphs,
    repeated_graphs,
)

_PLAIN = (str, bytes, int, float, bool, complex, type(None), np.generic, enum.Enum)
_PER_SAMPLE = (Tensor, np.ndarray)


def batch_size(batch: Any) -> int:
    """Number of samples of a batch.

    It is the first dimension of a tensor or array with which all others agree that are not in
    lists of samples; without such a tensor, the length of such lists. The samples of a ``Batch``
    of torch_geometric are its graphs; one ``Data`` is one sample.

    Raises:
        ValueError: there are no samples, or no number fits; the text names the places.
        TypeError: the batch holds something that cannot be cut.
    """
    tensors, lengths = _candidates(batch)
    if not tensors and not lengths:
        raise ValueError("the batch holds no tensor with samples, so it cannot be cut")
    errors = []
    for size in dict.fromkeys([*tensors, *lengths]):
        try:
            _walk(batch, "batch", size, functools.partial(_check, size=size))
            return size
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _check(item: Any, place: str, *, size: int) -> Any:
    found = _first_size(item)
    if found is not None and found != size:
        raise ValueError(
            "the tensors of a batch must agree in their first dimension to be cut into "
            f"micro-batches: {place} has {found}, the first tensor has {size}. Let "
            "the collate function put samples first, and keep what is not per sample out of "
            "the batch. Bags of different lengths (indices and offsets of an EmbeddingBag) can be "
            "cut when padded to (samples, length); its padding_idx leaves the padding out."
        )
    return item


def _candidates(item: Any) -> tuple[list[int], list[int]]:
    """First dimensions of all tensors and arrays; lengths of all lists inside of the batch."""
    if isinstance(item, _PER_SAMPLE):
        return ([len(item)] if item.ndim > 0 else []), []
    if is_graph(item):
        return [num_graphs(item)], []
    tensors: list[int] = []
    lengths: list[int] = []
    for part in _parts(item):
        is_list = isinstance(part, list | tuple) and not hasattr(part, "_fields")
        lengths += [len(part)] if is_list and len(part) else []
        inner = _candidates(part)
        tensors += inner[0]
        lengths += inner[1]
    return tensors, lengths


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
        return _walk(batch, "batch", None, _copy, on_other=lambda other, _: other)


def _copy(item: Any, place: str) -> Any:
    if is_graph(item):
        return copy_graphs(item)
    return item.clone() if isinstance(item, Tensor) else item


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


def unit_sizes(
    num_samples: int, *, full: int, asked: int, at_a_time: int, fewest: int = 1
) -> list[int]:
    """Samples of each of the smallest micro-batches of one mini-batch.

    A full mini-batch is cut into as many as asked; a smaller one, such as the last of an epoch,
    into fewer of about the same size. None of them has a single sample, of which BatchNorm has no
    statistics, unless those of a full one do or there is no other. One without samples stays whole.

    Args:
        num_samples: of this mini-batch.
        full: of a full one; at least ``num_samples``.
        asked: micro-batches of a full one.
        at_a_time: the number is a multiple of this, the most that a stage takes at a time, or less
            where there are too few samples for that.
        fewest: the fewest that a stage takes at a time. Where there are too few samples, every
            stage takes one micro-batch at a time, which has as many samples as these together.

    >>> unit_sizes(8, full=8, asked=4, at_a_time=1), unit_sizes(5, full=8, asked=4, at_a_time=1)
    ([2, 2, 2, 2], [3, 2])
    >>> unit_sizes(9, full=12, asked=12, at_a_time=12, fewest=4)
    [3, 3, 3]
    """
    most = max(1, min(asked, full))
    if full >= at_a_time:
        most = _in_turns(most, at_a_time)
    size = max(1, full // most)
    least = min(size, 2)
    count = max(1, min(most, -(-num_samples // size), num_samples // least))
    if num_samples >= least * at_a_time:
        count = _in_turns(count, at_a_time)
    else:
        size *= fewest
        count = max(1, min(count, -(-num_samples // size), num_samples // min(size, 2)))
    return microbatch_sizes(num_samples, count)


def _in_turns(count: int, at_a_time: int) -> int:
    """A multiple of ``at_a_time``; the largest up to ``count``, if there is one."""
    return max(1, count // at_a_time) * at_a_time


def cut_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cuts a batch into consecutive micro-batches of the given sizes.

    Tensors and arrays are cut along their first dimension. Lists with one item per sample are cut
    too: lists of that length, unless their items are themselves batched tensors (a list of
    fields). Batches of graphs are cut by graph. Tensors without dimensions and other plain data go
    into every micro-batch.

    Shapes:
        - every tensor: ``(sum(sizes), ...)`` or ``()``
    """
    if len(sizes) == 1:
        return [batch]
    starts = [0, *itertools.accumulate(sizes)]
    return [_part(batch, slice(a, b), starts[-1]) for a, b in itertools.pairwise(starts)]


def resized_batch(batch: Any, num_samples: int) -> Any:
    """A batch of so many samples: its first ones, or all of them over and over.

    Raises:
        ValueError: there are no samples, or their number is not clear.
        TypeError: the batch holds something that cannot be cut.
    """
    size = batch_size(batch)
    if num_samples <= size:
        return batch if num_samples == size else _part(batch, slice(num_samples), size)
    indices = [index % size for index in range(num_samples)]

    def repeated(item: Any, place: str) -> Any:
        if is_graph(item):
            return repeated_graphs(item, num_samples)
        return item[indices] if item.ndim else item

    def repeated_list(items: Sequence[Any]) -> Any:
        return type(items)([items[index] for index in indices])  # type: ignore[call-arg]

    return _walk(batch, "batch", size, repeated, repeated_list)


def refuse_full_graph(batch: Any, num_microbatches: int | None) -> None:
    """Refuses to train on one full graph, which cannot be cut, unless that was asked for.

    Raises:
        ValueError: the batch is or holds a graph that is no batch of graphs.
    """

    def check(item: Any, place: str) -> Any:
        if is_full_graph(item):
            raise ValueError(FULL_GRAPH.format(place=place, kind=type(item).__name__))
        return item

    if num_microbatches != 1:
        _walk(batch, "batch", None, check, on_other=lambda other, _: other)


def _part(batch: Any, part: slice, total: int) -> Any:
    def cut_tensor(item: Any, place: str) -> Any:
        if is_graph(item):
            return cut_graphs(item, part, place)
        return item[part] if item.ndim else item

    return _walk(batch, "batch", total, cut_tensor, lambda items: items[part])


def _refuse(item: Any, place: str) -> Any:
    raise TypeError(
        f"{place} is a {type(item).__name__}, which cannot be cut into micro-batches; expected "
        "tensors in dicts, lists, tuples or dataclasses, or a Batch of torch_geometric. Let the "
        "collate function return those."
    )


def _walk(
    item: Any,
    place: str,
    num_samples: int | None,
    on_tensor: Callable[[Any, str], Any],
    on_samples: Callable[[Sequence[Any]], Any] = lambda items: items,
    on_other: Callable[[Any, str], Any] = _refuse,
    siblings: Sequence[Any] = (),
) -> Any:
    """Rebuilds a nested batch with its tensors, arrays, graphs and lists of samples replaced.

    ``siblings`` are the other parts of the container that holds the item.
    """
    parts = _parts(item)

    def walk(inner: Any, where: str) -> Any:
        there = f"{place}{where}"
        return _walk(inner, there, num_samples, on_tensor, on_samples, on_other, parts)

    if isinstance(item, _PER_SAMPLE) or is_graph(item):
        return on_tensor(item, place)
    if isinstance(item, _PLAIN):
        return item
    if isinstance(item, Mapping):
        return _with_items(item, {key: walk(part, f"[{key!r}]") for key, part in item.items()})
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return _with_fields(item, {n: walk(p, f".{n}") for n, p in _fields(item).items()})
    if isinstance(item, list | tuple) and not isinstance(item, PackedSequence):
        if num_samples is not None and _is_per_sample(item, num_samples, siblings):
            return on_samples(item)
        walked = [walk(part, f"[{index}]") for index, part in enumerate(item)]
        return type(item)(*walked) if hasattr(item, "_fields") else type(item)(walked)
    return on_other(item, place)


def _with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same type, with whatever else the object knows, and with other values."""
    if type(mapping) is dict:
        return items
    if not isinstance(mapping, MutableMapping):
        return type(mapping)(items)  # type: ignore[call-arg]
    other = copy.copy(mapping)
    for key, value in items.items():
        other[key] = value
    return other


def _fields(item: Any) -> dict[str, Any]:
    """The fields that a dataclass has; those outside of ``__init__`` may not exist yet."""
    names = [field.name for field in dataclasses.fields(item)]
    return {name: getattr(item, name) for name in names if hasattr(item, name)}


def _with_fields(item: Any, values: dict[str, Any]) -> Any:
    """A dataclass with other values; numbers that its ``__post_init__`` derives are derived."""
    given = {field.name for field in dataclasses.fields(item) if field.init}
    other = dataclasses.replace(item, **{n: v for n, v in values.items() if n in given})
    for name, value in values.items():
        derived = isinstance(value, _PLAIN) and hasattr(other, name)
        if name not in given and not derived:
            object.__setattr__(other, name, value)
    return other


def _parts(item: Any) -> Sequence[Any]:
    """What a container of a batch holds; nothing for everything else."""
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, list | tuple):
        return item
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return list(_fields(item).values())
    return ()


def _is_per_sample(items: Sequence[Any], num_samples: int, siblings: Sequence[Any] = ()) -> bool:
    """Whether a list holds one item per sample, and is no list of batched fields.

    Samples are of one kind. Both may be: as many tensors as samples, each as long. Then it is the
    former beside another list that holds samples of some other length.
    """
    if len(items) != num_samples or hasattr(items, "_fields"):
        return False
    if len({_kind(part) for part in items if part is not None}) > 1:
        return False
    sizes = {_first_size(part) for part in items}
    if not (num_samples in sizes and sizes <= {num_samples, None}):
        return True
    return any(
        isinstance(other, list | tuple)
        and len(other) == num_samples
        and bool({_first_size(part) for part in other} - {num_samples, None})
        for other in siblings
    )


def _kind(item: Any) -> Any:
    """What samples of one list have in common."""
    if isinstance(item, _PER_SAMPLE):
        return type(item), item.dtype, item.ndim
    return "plain" if isinstance(item, _PLAIN) else type(item)


def _first_size(item: Any) -> int | None:
    """First dimension of the first tensor or array in something; None where there is none."""
    if isinstance(item, _PER_SAMPLE):
        return len(item) if item.ndim > 0 else None
    if is_graph(item):
        return num_graphs(item)
    return next((size for part in _parts(item) if (size := _first_size(part)) is not None), None)
