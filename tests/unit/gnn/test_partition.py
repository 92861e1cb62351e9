"""Dividing the vertices of a graph."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from lightning_gpp.gnn import GraphTrainingError, partition
from lightning_gpp.gnn.partition import ORDERING


def ring(num_vertices: int, apart: int = 1) -> Tensor:
    """A ring whose neighbours are so many numbers apart."""
    vertices = torch.arange(num_vertices)
    return torch.stack([vertices, (vertices + apart) % num_vertices])


@pytest.fixture
def without_metis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)


@pytest.mark.usefixtures("without_metis")
def test_without_metis_an_ordering_is_cut() -> None:
    chunks = partition(ring(120, apart=7), 120, 4)
    assert chunks.method == ORDERING
    assert chunks.sizes == [30] * 4
    assert chunks.cut <= 16  # a ring in this order goes up one side and down the other
    assert "pymetis is not installed" in chunks.describe()


@pytest.mark.parametrize(
    ("edges", "num_vertices", "num_chunks", "text"),
    [
        (torch.zeros(2, 0, dtype=torch.long), 4, 2, "no edges"),
        (ring(5), 4, 2, "names vertices 0 to 4, but there are 4"),
        (ring(4) - 1, 4, 2, "names vertices -1 to 2"),
        (ring(4), 4, 5, "4 vertices make 1 to 4 chunks, got 5"),
        (ring(4), 4, 0, "got 0"),
        (torch.zeros(3, 4), 4, 2, r"got torch.float32 of shape \(3, 4\)"),
    ],
)
def test_graphs_that_cannot_be_divided(
    edges: Tensor, num_vertices: int, num_chunks: int, text: str
) -> None:
    with pytest.raises(GraphTrainingError, match=text):
        partition(edges, num_vertices, num_chunks)
