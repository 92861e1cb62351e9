"""Of which entries micro-batches have unequal numbers: padding, ignored labels, masks.

A loss may be a mean over some entries only (``ignore_index``, a mask), which is a mean over samples
as long as every micro-batch has as many of them. Which entries it leaves out is not known, so those
that losses do leave out are counted: zeros, negative numbers, NaN, the largest value (255, the size
of a vocabulary) and the most common one (padding). A mini-batch is of a new kind if micro-batches
differ in the number of entries that did not differ before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_gpp.common.host_copies import to_host

_MOST_VALUES = 8
"""Of a tensor's largest or most common values: with more of them they mean nothing special."""

_SMALL = 1 << 16
"""Entries of a tensor up to which all of these are looked for."""

_Key = tuple[int, str, float]
"""Leaf of the batch, what is counted, its value."""


class CountedEntries:
    """Which numbers of entries have differed between micro-batches so far."""

    def __init__(self) -> None:
        self._known: set[_Key] = set()
        self._num_values: Counter[tuple[int, str]] = Counter()

    def new_pairs(self, batch: Any, sizes: Sequence[int]) -> list[int]:
        """Micro-batches that differ, each from the next, in what did not differ before; a few.

        Args:
            batch: the mini-batch.
            sizes: samples of each micro-batch.
        """
        new: dict[_Key, set[int]] = {}
        for key, counts in _counts(batch, sum(sizes)):
            if key in self._known or self._num_values[key[:2]] == _MOST_VALUES:
                continue
            left = iter(counts)
            means = [sum(next(left) for _ in range(size)) / size for size in sizes]
            if firsts := {i for i, (one, other) in enumerate(pairwise(means)) if one != other}:
                new[key] = firsts
        self._known.update(new)
        self._num_values.update(key[:2] for key in new)
        pairs = []
        while new:
            ((first, _),) = Counter(chain(*new.values())).most_common(1)
            pairs.append(first)
            new = {key: firsts for key, firsts in new.items() if first not in firsts}
        return pairs


def _counts(batch: Any, num_samples: int) -> Iterator[tuple[_Key, Sequence[int]]]:
    """What is counted, and how many a sample has."""
    kinds: list[tuple[int, list[str]]] = []
    tables: list[Tensor] = []
    for index, leaf in enumerate(pytree.tree_leaves(batch)):
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.is_complex():
            continue
        if leaf.dim() == 0 or len(leaf) != num_samples or not leaf.numel():
            continue
        found = _entries(leaf.detach().reshape(num_samples, -1))
        if found:
            columns = torch.stack([each.sum(1) for _, each, _ in found])
            values = torch.stack([value.to(columns.dtype) for _, _, value in found])
            kinds.append((index, [what for what, _, _ in found]))
            tables.append(torch.cat([values[:, None], columns], 1))
    for (index, whats), numbers in zip(kinds, to_host(tables), strict=True):
        for what, (value, *counts) in zip(whats, numbers.tolist(), strict=True):
            yield (index, what, value), counts


def _entries(rows: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """What is counted in a tensor: its name, where it is, and its value if that may vary."""
    none, is_small = rows.new_zeros(()), rows.numel() <= _SMALL
    if rows.dtype == torch.bool:
        return [("zero", ~rows, none)]
    if rows.is_floating_point():
        return [("zero", rows == 0, none), ("nan", rows.isnan(), none)] if is_small else []
    most = rows.max()
    found = [("zero", rows == 0, none), ("negative", rows < 0, none), ("most", rows == most, most)]
    if is_small:
        common = rows.flatten().mode().values
        found.append(("common", rows == common, common))
    return found
