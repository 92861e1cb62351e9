"""A stack of graph convolutions, pooling over each graph, a head.

Layers: GCN (Kipf and Welling, arXiv 1609.02907), GraphSAGE (Hamilton et al., 1706.02216), GIN (Xu
et al., 1810.00826), GAT (Velickovic et al., 1710.10903), GCNII (Chen et al., 2007.02133).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.nn import (
    GATConv,
    GCN2Conv,
    GCNConv,
    GINConv,
    SAGEConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)

if TYPE_CHECKING:
    from .data import GraphData

GAT_HEADS = 4


def _gin(width: int, _: int) -> nn.Module:
    conv: nn.Module = GINConv(
        nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    )
    return conv


LAYERS: Mapping[str, Callable[[int, int], nn.Module]] = MappingProxyType(
    {
        "gcn": lambda width, _: GCNConv(width, width),
        "sage": lambda width, _: SAGEConv(width, width),
        "gin": _gin,
        "gat": lambda width, _: GATConv(width, width // GAT_HEADS, heads=GAT_HEADS),
        "gcn2": lambda width, depth: GCN2Conv(width, alpha=0.1, theta=0.5, layer=depth),
    }
)
"""Name -> (width, number of the layer from 1) -> layer."""

POOLS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"mean": global_mean_pool, "add": global_add_pool, "max": global_max_pool}
)


class GraphNetwork(LightningModule):
    """Predicts a class or a number for each graph.

    Every layer sees normalised nodes and adds to them; the graph is the pooled sum.

    Args:
        num_features: features of a node.
        num_classes: None predicts a number per graph.
        layer: ``"gcn"``, ``"sage"``, ``"gin"``, ``"gat"`` or ``"gcn2"``.
        depth: number of layers.
        width: features of a node inside.
        pool: ``"mean"``, ``"add"`` or ``"max"``.
        dropout: probability of dropping a feature after each layer.
        learning_rate: of AdamW.
        weight_decay: of AdamW.

    Shapes:
        - ``forward(batch)``: returns logits ``(num_graphs, num_classes)``, or numbers
          ``(num_graphs,)``

    Raises:
        ValueError: an unknown layer or pooling, or a width that GAT cannot share among its heads.
    """

    def __init__(
        self,
        num_features: int,
        num_classes: int | None,
        layer: str = "gin",
        depth: int = 4,
        width: int = 64,
        pool: str = "mean",
        dropout: float = 0.0,
        learning_rate: float = 0.002,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__()
        if layer not in LAYERS:
            raise ValueError(f"layer is {layer!r}; expected one of {', '.join(LAYERS)}")
        if pool not in POOLS:
            raise ValueError(f"pool is {pool!r}; expected one of {', '.join(POOLS)}")
        if layer == "gat" and width % GAT_HEADS:
            raise ValueError(f"width must be a multiple of {GAT_HEADS} heads for gat, got {width}")
        self.save_hyperparameters()
        self.layer = layer
        self.num_classes = num_classes
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.stem = nn.Linear(num_features, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.convs = nn.ModuleList(LAYERS[layer](width, 1 + index) for index in range(depth))
        self.dropout = nn.Dropout(dropout)
        self.pool = POOLS[pool]
        self.head = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, num_classes or 1),
        )

    @classmethod
    def for_data(cls, data: GraphData, **options: Any) -> GraphNetwork:
        """The network for the features and classes of ``data``, which are read for that.

        Raises:
            TypeError: these are no data of this recipe.
        """
        if not hasattr(data, "graphs"):
            raise TypeError(
                f"the recipe gnn got data of type {type(data).__name__}; expected data=motifs, "
                "data=tu, or one graph: data=sbm, planetoid, coauthor, flickr, reddit or squirrel"
            )
        return cls(data.num_features, data.num_classes, **options)

    def forward(self, batch: Batch) -> Tensor:
        """Logits or numbers, a row per graph."""
        first = h = self.stem(batch.x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            nodes = norm(h)
            if self.layer == "gcn2":
                changed = conv(nodes, first, batch.edge_index)
            else:
                changed = conv(nodes, batch.edge_index)
            h = h + self.dropout(F.relu(changed))
        out: Tensor = self.head(self.pool(h, batch.batch, batch.num_graphs))
        return out if self.num_classes is not None else out.squeeze(1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean loss over the graphs, logged as ``train_loss``."""
        loss = self.loss(self(batch), batch.y)
        self.log("train_loss", loss, prog_bar=True, batch_size=batch.num_graphs)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs ``val_loss`` and ``val_acc`` (``val_mae`` of numbers) over all graphs."""
        out = self(batch)
        if self.num_classes is None:
            name, value = "val_mae", (out - batch.y).abs().mean()
        else:
            name, value = "val_acc", (out.argmax(dim=1) == batch.y).to(out.dtype).mean()
        size = batch.num_graphs
        self.log("val_loss", self.loss(out, batch.y), prog_bar=True, batch_size=size)
        self.log(name, value, prog_bar=True, batch_size=size)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The most likely class of every graph, or its number."""
        out: Tensor = self(batch)
        return out if self.num_classes is None else out.argmax(dim=1)

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        """Cross entropy of classes, squared error of numbers; the mean over graphs."""
        if self.num_classes is None:
            return F.mse_loss(out, target.to(out.dtype))
        return F.cross_entropy(out, target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay
        )
