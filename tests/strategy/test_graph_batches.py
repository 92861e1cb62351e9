"""Batches of graphs: cut by graph; training equals one device; one full graph is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch_geometric")
from torch_geometric.data import Batch, Data

from lightning_gpp.strategy.microbatches import (
    batch_size,
    cut_batch,
    few_samples,
    refuse_full_graph,
)


def graph(num_nodes: int) -> Data:
    edges = torch.randint(0, num_nodes, (2, 2 * num_nodes))
    x, y = torch.randn(num_nodes, 2), torch.randn(1, 3)
    return Data(x=x, edge_index=edges, y=y, note=f"{num_nodes} nodes", count=num_nodes)


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4))
def test_cut_then_joined_is_the_batch(parts: list[list[int]]) -> None:
    whole = Batch.from_data_list([graph(size) for part in parts for size in part])
    labels = torch.arange(whole.num_graphs)
    batch = {"graphs": whole, "labels": labels}
    assert batch_size(batch) == len(labels)
    pieces = cut_batch(batch, [len(part) for part in parts])
    for piece, part in zip(pieces, parts, strict=True):
        assert piece["graphs"].count.tolist() == part
        assert piece["graphs"].edge_index.max() < sum(part)
        assert len(piece["labels"]) == len(part)
    graphs = [one for piece in pieces for one in piece["graphs"].to_data_list()]
    again = Batch.from_data_list(graphs)
    for key in ("x", "edge_index", "y", "batch", "ptr", "count"):
        assert torch.equal(again[key], whole[key]), key
    assert again.note == whole.note


def test_the_loss_is_tried_on_graphs_of_unlike_sizes() -> None:
    batch = Batch.from_data_list([graph(size) for size in (5, 9, 2, 5, 7, 3)])
    assert few_samples(batch, 4, 6).count.tolist() == [2, 3, 7, 9]


def test_one_full_graph_is_refused_unless_asked_for() -> None:
    batch = {"graph": graph(4)}
    refuse_full_graph(batch, 1)
    assert batch_size(batch) == 1
    for asked in (None, 4):
        with pytest.raises(ValueError, match=r"not there yet\. Use num_microbatches=1"):
            refuse_full_graph(batch, asked)


def test_a_batch_made_by_hand_is_refused() -> None:
    batch = Batch(x=torch.ones(4, 1), batch=torch.tensor([0, 0, 1, 1]))
    with pytest.raises(TypeError, match=r"Batch\.from_data_list"):
        cut_batch(batch, [1, 1])
