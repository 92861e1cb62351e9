"""Logged numbers of micro-batches are joined as their ``reduce_fx`` says; shapes are checked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_gpp.strategy.logging.logs import as_number, joined


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [
        ("mean", 1.0),  # over samples
        (torch.mean, 1.0),
        ("sum", 6.0),
        (sum, 6.0),
        ("max", 4.0),
        (torch.max, 4.0),
        ("MIN", 0.0),
        (min, 0.0),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_joined_numbers(reduce_fx: Any, expected: float) -> None:
    values = [torch.tensor(value) for value in (1.0, 0.0, 1.0, 4.0)]
    assert float(joined(values, [3, 3, 1, 1], reduce_fx)) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_over_more_samples_than_a_short_type_can_count(dtype: torch.dtype) -> None:
    values = [torch.tensor(value, dtype=dtype) for value in (1.0, 4.0)]
    found = joined(values, [200_000, 100_000], "mean")
    assert found.dtype == dtype and float(found) == 2.0
    assert float(joined(values, [257, 3], "mean")) == float(torch.tensor(269 / 260, dtype=dtype))


def test_weights_of_whole_numbers() -> None:
    assert float(joined([torch.tensor(3), torch.tensor(6)], [2, 1], "mean")) == 4.0


def test_what_is_no_number_stays_none() -> None:
    values = [torch.tensor(1.0), torch.tensor(math.nan)]
    assert math.isnan(joined(values, [1, 1], "mean"))


@pytest.mark.parametrize(
    ("value", "expected"), [(3, 3.0), (True, 1.0), (torch.tensor([[2]]), 2.0), (0.5, 0.5)]
)
def test_logged_values_are_numbers_of_their_own(value: Any, expected: float) -> None:
    found = as_number("name", value)
    assert found.shape == () and found.is_floating_point() and float(found) == expected
    if isinstance(value, torch.Tensor):
        value += 1
        assert float(found) == expected


def test_logged_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'name'.*shape \(3,\); expected one number"):
        as_number("name", torch.ones(3))
