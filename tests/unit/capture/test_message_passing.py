"""Layers of torch_geometric."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pipelined import assert_partitions_exact, data
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("error")


def test_message_passing_layers_are_leaves() -> None:
    pyg = pytest.importorskip("torch_geometric.nn")

    class Gnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = pyg.GCNConv(3, 4), pyg.GCN2Conv(4, 0.1, 0.5, 2)

        def forward(self, x: Tensor, edges: Tensor, weights: Tensor | None = None) -> Tensor:
            h = F.dropout(self.a(x, edges, weights).relu(), 0.5, self.training)
            return self.b(h, h, edges)

    captured = assert_partitions_exact(
        Gnn(), data(6, 3), torch.randint(0, 6, (2, 12)), in_order=True
    )
    assert [operator.name for operator in captured.graph] == ["a", "relu", "dropout", "b"]
