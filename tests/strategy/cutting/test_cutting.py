"""Arguments of the forward are cut, and its outputs joined, only where that changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_gpp.runtime.pieces import Slices
from lightning_gpp.strategy.cutting.cutting import (
    CannotJoinError,
    join_values,
    pieces_of,
    size_by_dims,
)
from lightning_gpp.strategy.cutting.graphs import graph_slices

DIMS = {"x": (0,), "steps": (1,), "scale": (None,), "pair": (0, None)}


@pytest.mark.parametrize(
    ("inputs", "size"),
    [
        ({"x": torch.ones(6, 2), "steps": torch.ones(3, 6), "scale": torch.ones(5)}, 6),
        ({"x": torch.ones(12), "steps": torch.ones(3, 6), "pair": torch.ones(6)}, 6),
        ({"x": torch.ones(6), "steps": torch.ones(3, 4)}, None),
        ({"x": torch.ones(6).to_sparse()}, None),
        ({"x": torch.ones(0, 2)}, None),
        ({"scale": torch.ones(6)}, None),
    ],
)
def test_samples_of_a_call(inputs: dict[str, torch.Tensor], size: int | None) -> None:
    assert size_by_dims(inputs, DIMS) == size


def test_what_is_cut_and_joined_is_the_same() -> None:
    inputs = {
        "x": torch.arange(10),
        "steps": torch.arange(10).reshape(2, 5),
        "scale": torch.ones(5),
    }
    slices = {"x": Slices(0, (6, 4)), "steps": Slices(1, (3, 2)), "scale": Slices(None)}
    pieces = pieces_of(inputs, slices, 2)
    assert [piece["x"].tolist() for piece in pieces] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert [piece["steps"].shape for piece in pieces] == [(2, 3), (2, 2)]
    joined = join_values(pieces, DIMS, [3, 2])
    assert all(torch.equal(joined[name], inputs[name]) for name in inputs)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("scale", [torch.tensor(1.0), torch.tensor(2.0)]),
        ("x", [torch.ones(2, 2), torch.ones(1, 1)]),
        ("x", [torch.ones(2), torch.ones(2)]),
        ("pair", [(torch.ones(2), torch.ones(1)), (torch.ones(1), 3)]),
        ("pair", [[torch.ones(2), "a"], [torch.ones(1), "b"]]),
        ("pair", [[torch.ones(2)], (torch.ones(1),)]),
    ],
)
def test_what_cannot_be_joined(name: str, values: list[Any]) -> None:
    with pytest.raises(CannotJoinError, match=name):
        join_values([{name: value} for value in values], DIMS, [2, 1])


def test_a_batch_of_graphs_is_cut_by_graph() -> None:
    """Three graphs of 2, 1 and 2 nodes: 0 - 1 | 2 | 3 - 4."""
    inputs = {
        "x": torch.arange(5.0)[:, None],
        "edge_index": torch.tensor([[0, 1, 3], [1, 0, 4]]),
        "edge_weight": torch.tensor([1.0, 2.0, 3.0]),
        "batch": torch.tensor([0, 0, 1, 2, 2]),
        "ptr": torch.tensor([0, 2, 3, 5]),
    }
    slices = graph_slices(inputs, [2, 1])
    assert slices is not None
    first, second = pieces_of(inputs, slices, 2)
    assert first["x"].flatten().tolist() == [0, 1, 2] and second["batch"].tolist() == [0, 0]
    assert first["edge_index"].tolist() == [[0, 1], [1, 0]]
    assert second["edge_index"].tolist() == [[0], [1]]
    assert second["edge_weight"].tolist() == [3]
    assert first["ptr"].tolist() == [0, 2, 3] and second["ptr"].tolist() == [0, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"batch": torch.tensor([0, 1, 0, 2, 2])},
        {"edge_index": torch.tensor([[3, 0, 1], [4, 1, 0]])},
    ],
)
def test_graphs_that_are_not_side_by_side_are_not_cut(change: dict[str, torch.Tensor]) -> None:
    inputs = {
        "x": torch.ones(5, 1),
        "edge_index": torch.tensor([[0, 1, 3], [1, 0, 4]]),
        "batch": torch.tensor([0, 0, 1, 2, 2]),
    }
    assert graph_slices(inputs | change, [2, 1]) is None
