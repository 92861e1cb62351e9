"""The recipe's network on one graph in plain Lightning, on one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.training import make_trainer
from lightning.pytorch import seed_everything

pytest.importorskip("torch_geometric")

from lightning_gpp.recipes.gnn import BlockModel, GraphNetwork, Motifs, NodeNetwork, network_for
from lightning_gpp.recipes.gnn.node_model import NODE_LAYERS
from lightning_gpp.recipes.multimodal import Digits


@pytest.fixture(scope="module")
def blocks() -> BlockModel:
    return BlockModel(120, 600, num_classes=3)


@pytest.mark.parametrize("layer", NODE_LAYERS)
def test_shapes_and_gradients(blocks: BlockModel, layer: str) -> None:
    model = NodeNetwork.for_data(blocks, layer=layer, depth=2, width=8, dropout=0.0)
    out = model(blocks.graph.x, blocks.graph.edge_index)
    assert out.shape == (120, 3)
    out.square().sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not without


def test_steps_see_their_vertices_alone(blocks: BlockModel) -> None:
    """The loss is that of the vertices to train on; metrics are those of theirs."""
    data = BlockModel(120, 600, num_classes=3)
    seed_everything(1)
    model = NodeNetwork.for_data(data, depth=2, width=8, dropout=0.0)
    graph = data.graph
    scores = model(graph.x, graph.edge_index).detach()
    mask = graph.train_mask
    expected = float(F.cross_entropy(scores[mask], graph.y[mask]))
    trainer = make_trainer(None, max_epochs=1)
    trainer.fit(model, data)
    metrics = trainer.callback_metrics
    assert float(metrics["train_loss"]) == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        scores = model.eval()(graph.x, graph.edge_index)
    right = (scores.argmax(1) == graph.y).float()
    for name in ("val", "test"):
        found = float(metrics[f"{name}_acc"])
        assert found == pytest.approx(float(right[graph[f"{name}_mask"]].mean()))


def test_neighbours_tell_more_than_features() -> None:
    """Training on the graph beats the best guess from features alone."""
    seed_everything(0)
    data = BlockModel(600, 3000, num_classes=3, train_fraction=0.3)
    model = NodeNetwork.for_data(data, depth=4, width=32, learning_rate=0.01)
    trainer = make_trainer(None, max_epochs=80)
    trainer.fit(model, data)
    assert float(trainer.callback_metrics["test_acc"]) > data.best_accuracy_of_features + 0.1


def test_options_are_checked(blocks: BlockModel) -> None:
    with pytest.raises(ValueError, match=r"layer is 'gnc'; expected one of gcn, .*, resgcn"):
        NodeNetwork.for_data(blocks, layer="gnc")
    with pytest.raises(ValueError, match="width must be a multiple of 4 heads for gat, got 10"):
        NodeNetwork.for_data(blocks, layer="gat", width=10)


def test_data_choose_the_network(blocks: BlockModel) -> None:
    assert type(network_for(blocks, layer="gcn", depth=1)) is NodeNetwork
    assert type(network_for(Motifs(num_graphs=16), layer="gcn", depth=1)) is GraphNetwork
    with pytest.raises(TypeError, match="got data of type Digits"):
        network_for(Digits())  # type: ignore[arg-type]
