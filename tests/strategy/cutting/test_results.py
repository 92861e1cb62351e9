"""Lists of samples are cut into micro-batches, and results of micro-batches joined."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lightning_gpp.strategy.cutting.microbatches import batch_size, cut_batch
from lightning_gpp.strategy.cutting.results import combine_results

SIZES = [2, 1]


class Pair(NamedTuple):
    """Two fields of a batch or a result."""

    first: Any
    second: Any


# Cutting -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "items",
    [
        [[1, 2], [], [3]],
        [{"a": 1.5, "t": torch.ones(4)}, {"a": 2.5, "t": torch.ones(4)}, {"a": 0.0}],
        [torch.ones(2), torch.ones(1), torch.ones(5)],
        [torch.tensor(1), torch.tensor(2), torch.tensor(3)],
        [None, "b", 3],
        ("a", "b", "c"),
    ],
    ids=["lists", "dicts", "tensors", "numbers in tensors", "plain", "tuple"],
)
def test_lists_of_samples_are_cut(items: Any) -> None:
    batch = {"x": torch.arange(3), "items": items}
    assert batch_size(batch) == 3
    parts = cut_batch(batch, SIZES)
    assert [len(part["items"]) for part in parts] == SIZES
    assert type(parts[0]["items"]) is type(items)
    joined = [item for part in parts for item in part["items"]]
    assert all(got is want for got, want in zip(joined, items, strict=True))


@pytest.mark.parametrize(
    "batch",
    [
        [torch.arange(2), ["a", "b"]],
        (torch.arange(2), torch.ones(2, 2)),
        Pair(torch.arange(2), torch.arange(2)),
        {"fields": [torch.arange(2), {"t": torch.ones(2)}]},
    ],
    ids=["list", "tuple", "namedtuple", "nested"],
)
def test_as_many_fields_as_samples_are_no_samples(batch: Any) -> None:
    for index, part in enumerate(cut_batch(batch, [1, 1])):
        assert type(part) is type(batch)
        fields = part["fields"] if isinstance(part, dict) else part
        assert len(fields) == 2
        assert fields[0].tolist() == [index]


def test_lists_of_another_length_go_into_every_micro_batch() -> None:
    parts = cut_batch({"x": torch.arange(3), "names": ["a", "b"]}, SIZES)
    assert [part["names"] for part in parts] == [["a", "b"], ["a", "b"]]


def test_a_sequence_as_long_as_the_batch_is_still_a_sample() -> None:
    batch = {"x": torch.arange(3), "words": [torch.ones(2), torch.ones(3), torch.ones(4)]}
    assert batch_size(batch) == 3
    parts = cut_batch(batch, SIZES)
    assert [[len(word) for word in part["words"]] for part in parts] == [[2, 3], [4]]


# Joining -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([1.0, 4.0], 2.0),
        ([np.float32(1), np.float32(4)], 2.0),
        ([7, 7], 7),
        (["a", "a"], "a"),
        ([None, None], None),
        ([["a", "b"], ["c"]], ["a", "b", "c"]),
        ([[[1], []], [[2, 3]]], [[1], [], [2, 3]]),
        ([[{"n": 1}, {"n": 2}], [{"n": 3}]], [{"n": 1}, {"n": 2}, {"n": 3}]),
        ([(["a", "b"], 1.0), (["c"], 4.0)], (["a", "b", "c"], 2.0)),
        ([[1.0, 2.0, 3.0], [4.0, 2.0, 0.0]], [2.0, 2.0, 2.0]),
        ([{"a": {"b": 1.0}}, {"a": {"b": 4.0}}], {"a": {"b": 2.0}}),
        ([Pair(1.0, ["a", "b"]), Pair(4.0, ["c"])], Pair(2.0, ["a", "b", "c"])),
    ],
    ids=str,
)
def test_joined_values(results: list[Any], expected: Any) -> None:
    joined = combine_results(results, SIZES)
    assert joined == expected and type(joined) is type(results[0])


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
    arrays = combine_results([result.numpy() for result in results if result.dim()] or [1], SIZES)
    if expected.dim():
        assert isinstance(arrays, np.ndarray)
        np.testing.assert_allclose(arrays, expected.numpy())


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
        ([{"a": "x"}, {"a": "y"}], r"result\['a'\]: str values differ"),
        ([[1, 2, 3], [1, 2]], "lists of different lengths"),
        ([torch.ones(3), torch.ones(4)], r"result: tensors of shapes \[\(3,\), \(4,\)\]"),
        ([(0, torch.ones(3)), (0, torch.ones(4))], r"result\[1\]: tensors of shapes"),
    ],
    ids=["keys", "text", "lengths", "shapes", "place"],
)
def test_results_that_cannot_be_joined(results: list[Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        combine_results(results, SIZES)


def test_arrays_that_torch_does_not_know_are_joined() -> None:
    swapped = [np.array([0, 1], dtype=">f4"), np.array([2], dtype=">f4")]
    assert combine_results(swapped, SIZES).tolist() == [0, 1, 2]
    numbers = [np.array(16777217), np.array(16777217)]
    assert combine_results(numbers, SIZES).item() == 16777217
