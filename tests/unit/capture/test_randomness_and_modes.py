"""Dropout of every kind, and modules that run other operators in eval mode."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from pipelined import assert_partitions_exact, data
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("error")


class Dropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.a(x))
        return F.dropout(self.b(h), 0.3, self.training) + F.dropout(h, 0.5, self.training).sum()


def test_dropout_of_both_kinds() -> None:
    assert_partitions_exact(Dropouts(), data(4, 4), in_order=True)


class Drop(nn.Module):
    """Stochastic depth: nothing at all in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * x.new_empty(x.shape[0], 1).bernoulli_(0.5) / 0.5


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop_a, self.drop_b = Drop(), Drop()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_a(self.a(x))
        return x + self.drop_b(self.b(x))


def test_a_module_that_branches_on_the_mode_becomes_a_leaf() -> None:
    captured = assert_partitions_exact(Residual(), data(4, 4), in_order=True)
    assert [o.name for o in captured.graph] == ["a", "drop_a", "add", "b", "drop_b", "add_1"]
