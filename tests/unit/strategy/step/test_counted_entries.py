"""Kinds of mini-batches: what entries of their samples have in common."""

from __future__ import annotations

import torch

from lightning_gpp.strategy.step.cut_checks import CountedEntries


def test_numbers_as_far_apart_as_64_bits_allow() -> None:
    limits = torch.iinfo(torch.int64)
    ids = torch.tensor([[limits.min, 7], [limits.max, 7], [3, 4], [5, 6]])
    assert CountedEntries().new_pairs([ids], [1, 1, 1, 1]) == [0, 1]


def test_the_most_common_number_is_counted() -> None:
    tokens = torch.tensor([[5, 5, 1], [5, 5, 2], [5, 3, 4], [5, 5, 6]])
    assert CountedEntries().new_pairs([tokens], [1, 1, 1, 1]) == [2]
