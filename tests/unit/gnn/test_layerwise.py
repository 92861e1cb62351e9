"""Histories layer by layer, as the learning benchmark has them, against stages on chunks."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from helpers.chunk_stages import stages_of, train
from helpers.layerwise_history import LayerwiseHistory, SparseStem, layers
from torch import Tensor, nn

from lightning_gpp.capture import capture
from lightning_gpp.gnn import ChunkedModel, Techniques, mixing_methods, partition
from lightning_gpp.recipes.gnn import BlockModel, NodeNetwork

NUM_CHUNKS = 8

TECHNIQUES = [
    Techniques(),
    Techniques(refresh_every=3, historical_gradients=True),
    Techniques(refresh_every=1),
    Techniques(False, 1, True),
]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def blocks() -> BlockModel:
    data = BlockModel(120, 360)
    data.graph.x = data.graph.x.double()
    return data


def network(data: BlockModel, layer: str) -> NodeNetwork:
    torch.manual_seed(0)
    return NodeNetwork.for_data(data, layer=layer, depth=4, width=8, dropout=0.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("begins_exact", [False, True])
@pytest.mark.parametrize("techniques", TECHNIQUES)
@pytest.mark.parametrize("layer", ["gcn2", "resgcn"])
def test_layers_at_once_are_chunks_in_turn(
    blocks: BlockModel, layer: str, techniques: Techniques, begins_exact: bool
) -> None:
    """Scores and gradients, over refreshes and a validation between."""
    net = network(blocks, layer)
    twin, graph = copy.deepcopy(net), blocks.graph
    edges, args = graph.edge_index, (graph.x, graph.edge_index)
    chunks = partition(edges, len(graph.x), NUM_CHUNKS)
    captured = capture(net, args, opened=mixing_methods(net))
    inputs = captured.inputs(args, {})
    model = ChunkedModel(captured, inputs, chunks, techniques)
    stages = stages_of(model, 1)
    twin.stem = SparseStem(twin.stem, graph.x, nn.Identity())
    history = LayerwiseHistory.of(twin, edges, chunks, techniques)
    if begins_exact:
        with torch.no_grad(), model.filling():
            stages[0]([inputs[name] for name in stages[0].inputs], None, training=True)
        with torch.no_grad(), history.running(twin, exact=True, fills=True):
            twin(*args)

    def loss(scores: Tensor) -> Tensor:
        return F.cross_entropy(scores[graph.train_mask], graph.y[graph.train_mask])

    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (net, twin)]
    generator = torch.Generator().manual_seed(2)
    for _ in range(7):
        order = torch.randperm(NUM_CHUNKS, generator=generator).tolist()
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = train(model, stages, inputs, order, loss)
        history.begin_epoch(order)
        with history.running(twin, exact=False):
            scores = twin(*args)
            loss(scores).backward()
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)
        for one, other in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad(), history.running(twin, exact=True):
            torch.testing.assert_close(twin(*args), net(*args), rtol=0, atol=1e-12)


def test_without_chunks_it_is_the_network_itself(blocks: BlockModel) -> None:
    net = network(blocks, "resgcn")
    graph = blocks.graph
    history = LayerwiseHistory.of(net, graph.edge_index, None, Techniques())
    expected = net(graph.x, graph.edge_index)
    with history.running(net, exact=True):
        found = net(graph.x, graph.edge_index)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert "propagate" not in vars(net.convs[0])


def test_other_layers_are_refused(blocks: BlockModel) -> None:
    with pytest.raises(TypeError, match="only layers of GCNII and GraphSAGE"):
        layers(network(blocks, "gat"))
