"""Cuts a mini-batch of the data loader into micro-batches."""

from __future__ import annotations

import copy
import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_gpp.capture.values.structure import is_graph
from lightning_gpp.strategy.cutting.graphs import num_graphs, some_graphs

_PLAIN = (str, bytes, int, float, bool, complex, type(None), np.generic, enum.Enum)
_PER_SAMPLE = (Tensor, np.ndarray)


def batch_size(batch: Any) -> int:
    """Number of samples of a batch: the first dimension of its tensors and arrays.

    The samples of a ``Batch`` of torch_geometric are its graphs; one ``Data`` is one sample.

    Raises:
        ValueError: there are no samples, or tensors do not agree; the text names the places.
        TypeError: the batch holds something that cannot be cut.
    """
    if (size := size_or_none(batch)) is None:
        raise ValueError("the batch holds no tensor with samples, so it cannot be cut")

    def check(item: Any, place: str) -> Any:
        found = next(_first_sizes(item), size)
        if found != size:
            raise ValueError(
                f"the batch cannot be cut into micro-batches: {place} has {found} rows, the first "
                f"tensor {size}. Let the collate function return tensors with a row per sample. "
                "Pad bags of different lengths (EmbeddingBag with offsets) to (samples, length), "
                "with a padding_idx."
            )
        return item

    _walk(batch, "batch", size, check)
    return size


def size_or_none(batch: Any) -> int | None:
    """The first dimension of the first tensor of a batch; None where there is none."""
    return next(_first_sizes(batch), None)


def copy_tensors(batch: Any) -> Any:
    """A batch whose tensors are copies that autograd can work on.

    Tensors made in inference mode, as Lightning's validation loops make them, cannot.
    """

    def copied(item: Any, place: str) -> Any:
        return item.clone() if isinstance(item, Tensor) or is_graph(item) else item

    with torch.inference_mode(False):
        return _walk(batch, "batch", None, copied)


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

    Tensors and arrays are cut along their first dimension, batches of graphs by graph. Tensors
    without dimensions and other plain data go into every micro-batch.

    Shapes:
        - every tensor: ``(sum(sizes), ...)`` or ``()``
    """
    if len(sizes) == 1:
        return [batch]
    starts = [0, *itertools.accumulate(sizes)]
    return [chosen_samples(batch, slice(a, b)) for a, b in itertools.pairwise(starts)]


def resized_batch(batch: Any, num_samples: int) -> Any:
    """A batch of so many samples: its first ones, or all of them over and over.

    Raises:
        ValueError: there are no samples, or their number is not clear.
        TypeError: the batch holds something that cannot be cut.
    """
    size = batch_size(batch)
    if num_samples == size:
        return batch
    indices = [index % size for index in range(num_samples)]
    return chosen_samples(batch, slice(num_samples) if num_samples < size else indices)


def chosen_samples(batch: Any, chosen: slice | list[int]) -> Any:
    """A batch of some of the samples of another."""

    def taken(item: Any, place: str) -> Any:
        if is_graph(item):
            return some_graphs(item, chosen, place)
        return item[chosen] if item.ndim else item

    return _walk(batch, "batch", size_or_none(batch), taken)


def _walk(
    item: Any, place: str, num_samples: int | None, on_leaf: Callable[[Any, str], Any]
) -> Any:
    """Rebuilds a nested batch with its tensors, arrays and graphs replaced.

    Args:
        item: the batch, or a part of it.
        place: where it is, for error texts.
        num_samples: of a batch that is to be cut; None leaves what cannot be cut as it is.
        on_leaf: makes another one, of what is replaced and its place.
    """
    if isinstance(item, _PER_SAMPLE) or is_graph(item):
        return on_leaf(item, place)
    opened = None if isinstance(item, (*_PLAIN, PackedSequence)) else _opened(item)
    if opened is None:
        if num_samples is None or isinstance(item, _PLAIN):
            return item
        raise TypeError(
            f"{place} is a {type(item).__name__}, which cannot be cut into micro-batches; expected "
            "tensors in dicts, lists, tuples or dataclasses, or a Batch of torch_geometric. Let "
            "the collate function return those."
        )
    step, parts, rebuild = opened
    is_list = isinstance(item, list | tuple) and len(item) == num_samples != 1
    if is_list and next(_first_sizes(item), None) is None:
        raise TypeError(
            f"{place} is a {type(item).__name__} with an item per sample, which cannot be cut into "
            "micro-batches. Let the collate function return a tensor, or use schedule='gpipe'."
        )
    return rebuild(
        {
            key: _walk(part, place + step.format(key), num_samples, on_leaf)
            for key, part in parts.items()
        }
    )


def _opened(
    item: Any,
) -> tuple[str, Mapping[Any, Any], Callable[[dict[Any, Any]], Any]] | None:
    """Of a container: how its parts are looked up, the parts, and what makes another of others."""
    if isinstance(item, Mapping):
        return "[{!r}]", item, partial(_with_items, item)
    if isinstance(item, list | tuple):
        make = item._make if hasattr(item, "_make") else type(item)
        return "[{}]", dict(enumerate(item)), lambda parts: make(parts.values())
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        names = [field.name for field in dataclasses.fields(item) if hasattr(item, field.name)]
        fields = {name: getattr(item, name) for name in names}  # some may not exist yet
        return ".{}", fields, partial(_with_fields, item)
    return None


def _with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same type, with whatever else the object knows, and with other values."""
    if type(mapping) is dict:
        return items
    if not isinstance(mapping, MutableMapping):
        return type(mapping)(items)  # type: ignore[call-arg]
    other = copy.copy(mapping)
    for key, value in items.items():  # a type's own update may do other things, or be refused
        other[key] = value
    return other


def _with_fields(item: Any, values: dict[str, Any]) -> Any:
    """A dataclass with other values; numbers that its ``__post_init__`` derives are derived."""
    given = {field.name for field in dataclasses.fields(item) if field.init}
    other = dataclasses.replace(item, **{n: v for n, v in values.items() if n in given})
    for name, value in values.items():
        derived = isinstance(value, _PLAIN) and hasattr(other, name)
        if name not in given and not derived:
            object.__setattr__(other, name, value)
    return other


def _first_sizes(item: Any) -> Iterator[int]:
    """First dimensions of all tensors and arrays in something; for graphs their number."""
    if is_graph(item):
        yield num_graphs(item)
    elif isinstance(item, _PER_SAMPLE):
        yield from item.shape[:1]
    elif (opened := _opened(item)) is not None:
        for part in opened[1].values():
            yield from _first_sizes(part)
