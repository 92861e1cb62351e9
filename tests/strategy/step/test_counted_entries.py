"""A mini-batch whose micro-batches differ in a new way is looked at, wherever it comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gpp.strategy.step.cut_checks import CountedEntries

SIZES = [2, 2, 2, 2]


def labels(seed: int = 0, most: int = 11) -> Tensor:
    """Eight sequences of six, each entry of any value."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, most, (8, 6), generator=generator)


def padded(value: Any, rows: Tensor) -> Tensor:
    """The last two sequences have one entry; the rest of them is this value."""
    rows = rows.clone()
    rows[6:, 1:] = value
    return rows


@pytest.mark.parametrize(
    ("even", "uneven"),
    [
        (labels(), padded(-1, labels())),
        (labels(), padded(-100, labels())),
        (labels(), padded(0, labels())),
        (labels(), padded(255, labels())),
        (labels(most=50000), padded(1, labels(most=50000))),
        (torch.ones(8, 6, dtype=torch.bool), padded(False, torch.ones(8, 6, dtype=torch.bool))),
        (torch.ones(8, 6), padded(0.0, torch.ones(8, 6))),
        (torch.ones(8, 6), padded(torch.nan, torch.ones(8, 6))),
    ],
    ids=["-1", "-100", "0", "255", "the most common", "mask", "weights", "nan"],
)
def test_the_first_batch_that_differs_is_looked_at(even: Tensor, uneven: Tensor) -> None:
    found = CountedEntries()
    for _ in range(3):  # whatever else differs in these, it is known then
        found.new_pairs({"y": even}, SIZES)
    assert found.new_pairs({"y": even}, SIZES) == []
    assert 2 in found.new_pairs({"y": uneven}, SIZES)
    assert found.new_pairs({"y": uneven}, SIZES) == []


def test_one_pair_shows_what_several_tensors_differ_in() -> None:
    masks = padded(0, torch.ones(8, 3, dtype=torch.int64))
    assert CountedEntries().new_pairs([masks, masks.float(), 3, "text"], SIZES) == [2]


def test_micro_batches_of_unequal_sizes_are_compared_by_the_sample() -> None:
    mask = torch.zeros(8, 6, dtype=torch.bool)
    assert CountedEntries().new_pairs(mask, [3, 3, 2]) == []


def test_values_that_mean_nothing_end_the_looking() -> None:
    found = CountedEntries()
    looks = [found.new_pairs(labels(seed, most=10**6), SIZES) for seed in range(100)]
    assert sum(map(bool, looks)) <= 16
    assert not any(looks[50:])
