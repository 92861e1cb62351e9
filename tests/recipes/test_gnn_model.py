"""The recipe's graph network in plain Lightning, on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.training import make_trainer
from lightning.pytorch import seed_everything

pytest.importorskip("torch_geometric")
from torch_geometric.data import Batch

from lightning_gpp.recipes.gnn import GraphData, GraphNetwork, Motifs
from lightning_gpp.recipes.gnn.model import LAYERS, POOLS
from lightning_gpp.recipes.multimodal import Digits


def batch(data: GraphData, count: int = 5) -> Batch:
    return Batch.from_data_list(list(data.graphs[:count]))


@pytest.fixture(scope="module")
def motifs() -> Motifs:
    return Motifs(num_graphs=16)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("pool", POOLS)
def test_shapes_and_gradients(motifs: Motifs, layer: str, pool: str) -> None:
    model = GraphNetwork.for_data(motifs, layer=layer, pool=pool, depth=2, width=8)
    out = model(batch(motifs))
    assert out.shape == (5, 4)
    out.square().sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not without


def test_options_are_checked(motifs: Motifs) -> None:
    with pytest.raises(ValueError, match="layer is 'gnc'; expected one of gcn, sage"):
        GraphNetwork.for_data(motifs, layer="gnc")
    with pytest.raises(ValueError, match="pool is 'sum'"):
        GraphNetwork.for_data(motifs, pool="sum")
    with pytest.raises(ValueError, match="multiple of 4 heads"):
        GraphNetwork.for_data(motifs, layer="gat", width=10)
    with pytest.raises(TypeError, match="data of type Digits; expected data=motifs"):
        GraphNetwork.for_data(Digits())  # type: ignore[arg-type]


def trained(data: GraphData, folder: Path, max_epochs: int) -> dict[str, float]:
    seed_everything(0, verbose=False)
    trainer = make_trainer(
        None, max_epochs=max_epochs, precision="64-true", default_root_dir=folder
    )
    module = GraphNetwork.for_data(data, width=32, learning_rate=0.005)
    trainer.fit(module, datamodule=data)
    assert all(p.dtype == torch.float64 for p in module.parameters())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_learns_motifs_and_numbers_in_float64(tmp_path: Path) -> None:
    """Guessing gives 0.25; the variance of the numbers is what guessing their mean leaves."""
    metrics = trained(Motifs(num_graphs=320, batch_size=32), tmp_path, max_epochs=8)
    assert metrics["val_acc"] > 0.6
    numbers = Motifs(num_graphs=320, batch_size=32, target="degree_product")
    variance = float(torch.cat([graph.y for graph in numbers.graphs]).var())
    metrics = trained(numbers, tmp_path, max_epochs=8)
    assert metrics["val_loss"] < 0.5 * variance
    assert metrics["val_mae"] ** 2 <= metrics["val_loss"]
