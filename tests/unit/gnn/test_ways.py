"""Ways that exchange mirrors compute what one device computes, on any graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.chunk_stages import stages_of, train
from torch import Tensor, nn
from torch_geometric import nn as pyg

from lightning_gpp.capture import capture
from lightning_gpp.gnn import ChunkedModel, Chunks, GraphTrainingError, Techniques, mixing_methods


@pytest.fixture(autouse=True)
def _float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def divided(
    module: nn.Module, x: Tensor, edges: Tensor, num_ways: int, parts: Tensor | None = None
) -> ChunkedModel:
    """A module on one chunk of several ways."""
    if parts is None:
        parts = torch.arange(len(x)) % num_ways
    chunks = Chunks.of(parts, 1, edges, "by hand", num_ways)
    captured = capture(module, (x, edges), opened=mixing_methods(module))
    return ChunkedModel(captured, captured.inputs((x, edges), {}), chunks, Techniques())


class OneLayer(nn.Module):
    """A matrix, a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.stem, self.layer = nn.Linear(5, 4), layer

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        scores: Tensor = self.layer(self.stem(x), edge_index)
        return scores


class _Dropping(pyg.SAGEConv):
    """Drops features before it passes messages."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        scores: Tensor = super().forward(F.dropout(x, 0.5, self.training), edge_index)
        return scores


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (lambda: pyg.TAGConv(4, 4), r"TAGConv\) passes messages more than once.*ways=1"),
        (lambda: _Dropping(4, 4), r"_Dropping\) drops features before .*ways=1"),
    ],
)
def test_layers_that_ways_cannot_do_together(layer: Any, text: str) -> None:
    x, edges = torch.randn(6, 5), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    with pytest.raises(GraphTrainingError, match=text):
        divided(OneLayer(layer()), x, edges, 2)


def test_edges_that_come_later() -> None:
    """They lead from vertices that are no mirrors."""
    x, edges = torch.randn(6, 5), torch.tensor([[0, 2, 1], [2, 4, 3]])
    model = divided(OneLayer(pyg.GCNConv(4, 4)), x, edges, 2)
    stages, inputs = stages_of(model, 1), model.captured.inputs((x, edges), {})
    train(model, stages, inputs, [0], torch.sum)
    inputs["edge_index"] = torch.tensor([[0, 2, 1], [2, 4, 4]])
    with pytest.raises(GraphTrainingError, match="did not have when the graph was divided"):
        train(model, stages, inputs, [0], torch.sum)


def test_features_that_require_gradients() -> None:
    x, edges = torch.randn(6, 5, requires_grad=True), torch.tensor([[0, 1, 2], [1, 2, 3]])
    with pytest.raises(GraphTrainingError, match="argument x requires gradients"):
        divided(OneLayer(pyg.GCNConv(4, 4)), x, edges, 2)
