"""In-place changes keep their order under any partition."""

from __future__ import annotations

import pytest
import torch
from pipelined import assert_partitions_exact, data
from torch import Tensor, nn

from lightning_gpp.capture import capture

pytestmark = pytest.mark.filterwarnings("error")


class InPlace(nn.Module):
    def __init__(self, by_item: bool) -> None:
        super().__init__()
        self.by_item = by_item
        self.a, self.relu, self.b = nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.a(x))
        h = self.b(h)
        before = h.sum(1, keepdim=True)
        h.add_(1)
        if self.by_item:
            h[:, 0] = 0
        return h * before


@pytest.mark.parametrize("by_item", [False, True])
def test_in_place_changes_under_any_partition(by_item: bool) -> None:
    captured = assert_partitions_exact(InPlace(by_item), data(4, 4), num_partitions=10)
    # relu is with a; sum, add_ and the assignment are with b
    assert [operator.name for operator in captured.graph] == ["a", "b", "mul"]


class ChangesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        x += 1
        return h + self.b(x)


def test_in_place_change_of_an_input() -> None:
    module, x = ChangesInput(), data(4, 4)
    kept = x.clone()
    captured = capture(module, (x,), {})
    assert torch.equal(x, kept)
    expected = module(x.clone())
    (got,) = captured.stage([o.name for o in captured.graph], ["x"], captured.graph.outputs)(
        [x], training=True
    )
    assert torch.equal(got, expected)
    assert torch.equal(x, kept)
