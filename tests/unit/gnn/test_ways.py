"""Ways that exchange mirrors compute what one device computes, on any graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.chunk_stages import stages_of, train
from helpers.history_reference import Net
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric import nn as pyg

from lightning_gpp.capture import capture
from lightning_gpp.gnn import ChunkedModel, Chunks, GraphTrainingError, Techniques


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
    captured = capture(module, (x, edges))
    flags = {name: True for name, _ in module.named_modules()}
    return ChunkedModel(captured, captured.inputs((x, edges), {}), chunks, Techniques(), flags)


@settings(max_examples=12, deadline=None, phases=[Phase.generate])
@given(data=st.data())
@pytest.mark.parametrize("kind", ["gcn", "both_ways", "sage", "gcn2", "gin", "gat", "resgcn"])
def test_gradients_are_those_of_one_device(kind: str, data: st.DataObject) -> None:
    """Directed edges, loops, repetitions, lonely vertices, ways without edges or mirrors."""
    num_vertices = data.draw(st.integers(4, 14))
    num_ways = data.draw(st.integers(1, 3))
    vertex = st.integers(0, num_vertices - 1)
    pairs = data.draw(st.lists(st.tuples(vertex, vertex), min_size=1, max_size=30))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    edges = torch.tensor(pairs).T.contiguous()
    x = torch.randn(num_vertices, 5, generator=generator)
    y = torch.randint(0, 3, (num_vertices,), generator=generator)
    parts = torch.randperm(num_vertices, generator=generator) % num_ways
    torch.manual_seed(3)
    net = Net(kind, num_layers=2)
    twin = copy.deepcopy(net)
    model = divided(net, x, edges, num_ways, parts)
    num_stages = data.draw(st.integers(1, 2))

    def loss(scores: Tensor) -> Tensor:
        return F.cross_entropy(scores, y)

    inputs = model.captured.inputs((x, edges), {})
    scores = train(model, stages_of(model, num_stages), inputs, [0], loss)
    expected = twin(x, edges)
    loss(expected).backward()
    torch.testing.assert_close(scores, expected.detach(), rtol=0, atol=1e-9)
    for (name, one), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-9, msg=name)


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
