"""Embedding tables: lists of indices, bags, interactions."""

from __future__ import annotations

import pytest
import torch
from pipelined import assert_partitions_exact, data
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("error")


class Dlrm(nn.Module):
    """One embedding per table, interactions, as in DLRM: list inputs and a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Linear(3, 4)
        self.tables = nn.ModuleList(nn.EmbeddingBag(5, 4, mode="sum") for _ in range(3))
        self.top = nn.Linear(4 + 6, 1)

    def forward(self, dense: Tensor, offsets: Tensor, indices: Tensor) -> Tensor:
        x = self.bottom(dense)
        columns = [x, *(t(i, o) for t, i, o in zip(self.tables, indices, offsets, strict=True))]
        stacked = torch.cat(columns, dim=1).view(len(x), len(columns), -1)
        product = torch.bmm(stacked, stacked.transpose(1, 2))
        rows, cols = torch.tril_indices(product.shape[1], product.shape[1], offset=-1)
        return self.top(torch.cat([x, product[:, rows, cols]], dim=1))


def test_dlrm_with_iterated_tensors_needs_the_concrete_tracer() -> None:
    offsets = torch.arange(4).repeat(3, 1)
    captured = assert_partitions_exact(Dlrm(), data(4, 3), offsets, torch.randint(0, 5, (3, 4)))
    assert captured.graph.operator["tables_2"].parameters == ("tables.2.weight",)
