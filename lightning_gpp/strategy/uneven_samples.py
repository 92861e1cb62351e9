"""Which samples of a mini-batch to try a loss on: halves that hold very different amounts.

A loss that is a mean over counted tokens, pixels, nodes or weights is a mean over samples only
where all samples count the same. Samples that happen to be alike would hide that, so the loss is
tried on samples that are not: some that count little beside some that count much.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

IGNORED = -100
"""Label that losses of torch leave out unless told otherwise."""

_POOL = 24
_CLEARLY = np.log(2.0)


def unlike_halves(amounts: Sequence[Sequence[float]], count: int) -> list[int] | None:
    """Samples of two halves that differ in as many amounts as possible; None if all are alike.

    Both halves hold something of every amount where that can be, as the mean over nothing is no
    number. Beyond a factor of two a difference counts no more. Of many samples only those with the
    smallest and the largest amounts are considered.

    Args:
        amounts: what each sample holds, one row per kind, the kinds that matter most first.
        count: samples in all.

    >>> unlike_halves([[3, 3, 3, 3, 1, 5]], 4)
    [0, 4, 1, 5]
    >>> unlike_halves([[3, 3, 3, 3], [0, 0, 0, 0]], 2) is None
    True
    """
    rows = [np.asarray(row, dtype=float) for row in amounts if len(set(row)) > 1]
    if not rows:
        return None
    pool = _extremes(rows, max(_POOL, count))
    halves = np.array(list(itertools.combinations(pool, count // 2)))
    sums = np.array([row[halves].sum(1) for row in rows])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.abs(np.log(sums[:, :, None] / sums[:, None, :]))
    ratios[~np.isfinite(ratios)] = 0.0
    weights = 0.5 ** np.arange(len(rows))
    scores = np.tensordot(weights, np.minimum(ratios, _CLEARLY) + 1e-3 * ratios, 1)
    shared = (halves[:, None, :, None] == halves[None, :, None, :]).any((2, 3))
    first, second = np.unravel_index(np.where(shared, -1.0, scores).argmax(), scores.shape)
    return [*halves[first].tolist(), *halves[second].tolist()]


def _extremes(rows: Sequence[np.ndarray[Any, Any]], most: int) -> list[int]:
    """The samples with the smallest and the largest amounts of each kind, in order."""
    orders = [row.argsort(kind="stable") for row in rows]
    ends = [end for place in range(len(rows[0])) for end in (place, -1 - place)]
    found = dict.fromkeys(int(order[end]) for end in ends for order in orders)
    return sorted(list(found)[:most])


def tensor_amounts(tensor: Tensor | np.ndarray[Any, Any]) -> tuple[int, list[float]]:
    """What each sample holds of one tensor, and how much that matters (the lower the more).

    Entries count that are not :data:`IGNORED`, or where none is, those that are neither zero nor
    NaN, as in masks and padded rows of tokens. Single numbers per sample, such as weights or
    classes (which may have weights), count by their size.

    Shapes:
        - tensor: ``(num_samples, ...)``

    >>> tensor_amounts(np.array([[5, -100], [0, 2]]))
    (0, [1.0, 2.0])
    >>> tensor_amounts(np.array([[True, False], [True, True]]))
    (1, [1.0, 2.0])
    >>> tensor_amounts(np.array([2, -3]))
    (3, [2.0, 3.0])
    """
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.kind not in "biufc":
            return 1, [num_entries(item) for item in tensor.tolist()]
        tensor = torch.tensor(tensor)
    ignored = tensor == IGNORED
    has_ignored = bool(ignored.any())
    if tensor.ndim == 1:
        sizes = tensor.detach() if tensor.is_complex() else tensor.detach().double()
        sizes = (sizes.abs() + has_ignored).masked_fill(ignored, 0.0)
        return 0 if has_ignored else 3, sizes.nan_to_num(0.0, 0.0, 0.0).tolist()
    counts = ~ignored if has_ignored else (tensor != 0) & (tensor == tensor)
    importance = 0 if has_ignored else 1 + tensor.is_floating_point()
    return importance, counts.flatten(1).sum(1, dtype=torch.float64).tolist()


def num_entries(item: Any) -> float:
    """Entries of one sample of any kind: elements of tensors, characters of texts, or one."""
    if isinstance(item, Tensor):
        return item.numel()
    if isinstance(item, np.ndarray):
        return item.size
    if isinstance(item, str | bytes):
        return len(item)
    if isinstance(item, Mapping):
        return sum(map(num_entries, item.values()))
    return sum(map(num_entries, item)) if isinstance(item, list | tuple) else 1
