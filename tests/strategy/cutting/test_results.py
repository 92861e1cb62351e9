"""Results of micro-batches are joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_gpp.strategy.cutting.cutting import combine_results

SIZES = [2, 1]


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([1.0, 4.0], 2.0),
        ([np.float32(1), np.float32(4)], 2.0),
        ([7, 7], 7),
        (["a", "a"], "a"),
        ([None, None], None),
        ([{"a": {"b": 1.0}}, {"a": {"b": 4.0}}], {"a": {"b": 2.0}}),
    ],
    ids=str,
)
def test_joined_values(results: list[Any], expected: Any) -> None:
    joined = combine_results(results, SIZES)
    assert joined == expected


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([torch.ones(2, 2), torch.zeros(1, 2)], torch.tensor([[1.0, 1], [1, 1], [0, 0]])),
        ([torch.tensor([1, 2]), torch.tensor([3])], torch.tensor([1, 2, 3])),
        ([torch.tensor(1.0), torch.tensor(4.0)], torch.tensor(2.0)),
        ([torch.tensor([1.0, 1, 1]), torch.tensor([4.0, 1, 1])], torch.tensor([2.0, 1, 1])),
        ([torch.tensor(3), torch.tensor(3)], torch.tensor(3)),
    ],
    ids=["rows", "numbers", "means", "vectors of means", "equal"],
)
def test_joined_tensors(results: list[torch.Tensor], expected: torch.Tensor) -> None:
    joined = combine_results(results, SIZES)
    torch.testing.assert_close(joined, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_means_over_more_samples_than_a_short_type_can_count(dtype: torch.dtype) -> None:
    results = [torch.tensor(1.0, dtype=dtype), torch.tensor(4.0, dtype=dtype)]
    joined = combine_results(results, [200_001, 100_000])
    torch.testing.assert_close(joined, torch.tensor(600_001 / 300_001, dtype=dtype))
    uneven = combine_results([value + 1 for value in results], [257, 3])
    torch.testing.assert_close(uneven, torch.tensor(529 / 260, dtype=dtype))
    assert joined.dtype == uneven.dtype == dtype


def test_joined_results_carry_no_gradient() -> None:
    weight = torch.ones(2, requires_grad=True)
    joined = combine_results([{"loss": weight.sum(), "out": weight * 2}] * 2, [2, 2])
    assert not joined["loss"].requires_grad and not joined["out"].requires_grad


@pytest.mark.parametrize(
    ("results", "text"),
    [
        ([{"a": 1}, {"b": 1}], "different keys"),
        ([{"a": "x"}, {"a": "y"}], r"result\['a'\]: str values of micro-batches"),
        ([["a", "b"], ["c"]], "result: list values of micro-batches cannot be joined"),
        ([np.ones(2), np.ones(1)], "result: ndarray values"),
        ([torch.ones(3), torch.ones(4)], r"result: tensors of shapes \[\(3,\), \(4,\)\]"),
        ([{"b": torch.ones(3)}, {"b": torch.ones(4)}], r"result\['b'\]: tensors of shapes"),
    ],
    ids=["keys", "text", "lists", "arrays", "shapes", "place"],
)
def test_results_that_cannot_be_joined(results: list[Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        combine_results(results, SIZES)
