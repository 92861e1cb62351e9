"""The loss is tried on halves of samples that hold different amounts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.strategy.microbatches import picked_samples, telling_samples
from lightning_gpp.strategy.uneven_samples import tensor_amounts, unlike_halves


@given(
    st.integers(5, 40).flatmap(
        lambda size: st.lists(
            st.lists(st.integers(0, 9), min_size=size, max_size=size), min_size=1, max_size=4
        )
    )
)
def test_halves_differ_wherever_samples_do(rows: list[list[int]]) -> None:
    samples = unlike_halves(rows, 4)
    if samples is None:
        assert all(len(set(row)) == 1 for row in rows)
        return
    assert len(set(samples)) == 4
    first = next(row for row in rows if len(set(row)) > 1)
    low, high = sorted((sum(first[i] for i in samples[:2]), sum(first[i] for i in samples[2:])))
    assert 0 < low < high or sum(value > 0 for value in first) < 2


def test_amounts_that_go_against_each_other() -> None:
    tokens, answers = [9, 8, 7, 3, 2, 1], [1, 2, 3, 7, 8, 9]
    samples = unlike_halves([tokens, answers], 4)
    assert samples is not None
    for row in (tokens, answers):
        sums = [sum(row[i] for i in half) for half in (samples[:2], samples[2:])]
        assert max(sums) >= 2 * min(sums)


def test_a_half_without_any_counted_entry_is_avoided() -> None:
    assert unlike_halves([[0, 0, 0, 1, 1, 1]], 4) == [0, 3, 4, 5]


@pytest.mark.parametrize(
    ("values", "importance", "amounts"),
    [
        (torch.tensor([True, False]), 3, [1, 0]),
        (torch.tensor([0, -100, 2]), 0, [1, 0, 3]),  # class 0 counts
        (torch.tensor([float("nan"), -2.5]), 3, [0, 2.5]),
        (torch.tensor([[0, -100], [0, 0]]), 0, [1, 2]),
        (torch.tensor([[1.0, 0.0], [float("nan"), 0.0]]), 2, [1, 0]),
        (torch.ones(2, 0), 2, [0, 0]),
        (torch.ones(2, 3, dtype=torch.complex64), 1, [3, 3]),
        (torch.tensor([3j, 4]), 3, [3, 4]),
        (np.array([[1, 0], [1, 1]], dtype=np.uint8), 1, [1, 2]),
        (np.array(["a", "bcd"]), 1, [1, 3]),
        (np.array([{"x": "ab"}, [1, 2, 3]], dtype=object), 1, [2, 3]),
    ],
)
def test_amounts(values: torch.Tensor, importance: int, amounts: list[float]) -> None:
    assert tensor_amounts(values) == (importance, amounts)


def test_the_samples_of_nested_batches_stay_together() -> None:
    labels = torch.full((6, 3), -100)
    for sample, count in enumerate((2, 2, 2, 2, 1, 3)):
        labels[sample, :count] = sample
    batch = {"labels": labels, "texts": list("abcdef"), "pair": (np.arange(6), None), "n": 3}
    few = picked_samples(batch, telling_samples(batch, 4, 6), 6)
    chosen = few["labels"][:, 0].tolist()
    assert {4, 5} < set(chosen) and (chosen.index(4) < 2) != (chosen.index(5) < 2)
    assert few["texts"] == ["abcdef"[i] for i in chosen]
    assert few["pair"][0].tolist() == chosen and few["pair"][1] is None and few["n"] == 3


def test_samples_that_are_alike_are_the_first_ones() -> None:
    assert telling_samples({"x": torch.ones(8, 2)}, 4, 8) == [0, 1, 2, 3]
    rows = torch.arange(1, 9).double()[:, None] * torch.ones(8, 2)
    assert telling_samples((rows,), 4, 8) == [0, 1, 2, 3]
