"""A deep stack of graph convolutions that classifies the vertices of one graph."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch_geometric.data import Data

from .full_graph import FullGraphData
from .model import GAT_HEADS, LAYERS, GraphNetwork

if TYPE_CHECKING:
    from .data import GraphData

GCN2 = "gcn2"
RESIDUAL = "resgcn"

NODE_LAYERS = MappingProxyType({**LAYERS, RESIDUAL: LAYERS["sage"]})
"""Name -> (width, number of the layer from 1) -> layer, of :class:`NodeNetwork`."""


class NodeNetwork(LightningModule):
    """Predicts the class of every vertex of one graph.

    Every layer is dropout, graph convolution and ReLU; GCNII (``"gcn2"``; arXiv 2007.02133) takes
    the first features into each. ResGCN+ (``"resgcn"``; arXiv 2006.07739) has another order:
    LayerNorm, ReLU, dropout, GraphSAGE's convolution with the mean, and what went in added. Of the
    published ones only these two are any good with many layers.

    Args:
        num_features: of a vertex.
        num_classes: of vertices.
        layer: ``"gcn"``, ``"sage"``, ``"gin"``, ``"gat"``, ``"gcn2"`` or ``"resgcn"``.
        depth: number of layers.
        width: features of a vertex inside.
        dropout: probability of dropping a feature before each layer.
        learning_rate: of Adam.
        weight_decay: of Adam.
        layer_weight_decay: that of the convolutions and their norms, if it is another.

    Shapes:
        - ``forward(x, edge_index)``: ``(vertices, features)``, ``(2, edges)``; returns logits
          ``(vertices, classes)``

    Raises:
        ValueError: an unknown layer, or a width that GAT cannot share among its heads.
    """

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        layer: str = GCN2,
        depth: int = 32,
        width: int = 64,
        dropout: float = 0.5,
        learning_rate: float = 0.001,
        weight_decay: float = 0.0,
        layer_weight_decay: float | None = None,
    ) -> None:
        super().__init__()
        if layer not in NODE_LAYERS:
            raise ValueError(f"layer is {layer!r}; expected one of {', '.join(NODE_LAYERS)}")
        if layer == "gat" and width % GAT_HEADS:
            raise ValueError(f"width must be a multiple of {GAT_HEADS} heads for gat, got {width}")
        self.save_hyperparameters()
        self.layer = layer
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.layer_weight_decay = layer_weight_decay
        self.stem = nn.Linear(num_features, width)
        self.convs = nn.ModuleList(NODE_LAYERS[layer](width, 1 + index) for index in range(depth))
        num_norms = depth if layer == RESIDUAL else 0
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_norms))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, num_classes)

    @classmethod
    def for_data(cls, data: FullGraphData, **options: Any) -> NodeNetwork:
        """The network for the features and classes of ``data``, which are read for that."""
        return cls(data.num_features, data.num_classes, **options)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Logits, a row per vertex."""
        first = h = self.stem(self.dropout(x)).relu()
        for index, conv in enumerate(self.convs):
            if self.layer == RESIDUAL:
                h = h + conv(self.dropout(self.norms[index](h).relu()), edge_index)
            elif self.layer == GCN2:
                h = conv(self.dropout(h), first, edge_index).relu()
            else:
                h = conv(self.dropout(h), edge_index).relu()
        logits: Tensor = self.head(self.dropout(h))
        return logits

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        """Mean loss over the training vertices, logged as ``train_loss``."""
        logits = self(batch.x, batch.edge_index)
        loss = F.cross_entropy(logits[batch.train_mask], batch.y[batch.train_mask])
        self.log("train_loss", loss, prog_bar=True, batch_size=1)
        return loss

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        """Logs ``val_loss``, ``val_acc`` and ``test_acc`` over their vertices."""
        logits = self(batch.x, batch.edge_index)
        right = (logits.argmax(dim=1) == batch.y).to(logits.dtype)
        loss = F.cross_entropy(logits[batch.val_mask], batch.y[batch.val_mask])
        self.log("val_loss", loss, prog_bar=True, batch_size=1)
        self.log("val_acc", right[batch.val_mask].mean(), prog_bar=True, batch_size=1)
        self.log("test_acc", right[batch.test_mask].mean(), prog_bar=True, batch_size=1)

    def predict_step(self, batch: Data, batch_idx: int) -> Tensor:
        """The most likely class of every vertex."""
        classes: Tensor = self(batch.x, batch.edge_index).argmax(dim=1)
        return classes

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        decay = self.layer_weight_decay
        if decay is None:
            decay = self.weight_decay
        groups: list[dict[str, Any]] = [
            {"params": [*self.stem.parameters(), *self.head.parameters()]},
            {"params": [*self.convs.parameters(), *self.norms.parameters()], "weight_decay": decay},
        ]
        return torch.optim.Adam(
            groups,
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
        )


def network_for(
    data: GraphData | FullGraphData, *, pool: str = "mean", **options: Any
) -> GraphNetwork | NodeNetwork:
    """The network that data of this family need.

    Args:
        data: many graphs, or one whose vertices have classes.
        pool: how vertices of a graph are pooled, where graphs are many.
        options: of the network.
    """
    if isinstance(data, FullGraphData):
        return NodeNetwork.for_data(data, **options)
    return GraphNetwork.for_data(data, pool=pool, **options)
