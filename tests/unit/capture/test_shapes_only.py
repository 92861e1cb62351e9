"""Capture of modules whose tensors have shapes and no values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture import CaptureError, capture

META = torch.device("meta")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 8), nn.Linear(4, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.left(x).relu() + self.right(x)))


def test_the_graph_is_that_of_real_tensors() -> None:
    real = capture(Two(), (torch.ones(6, 4),)).graph
    shapes = capture(Two().to(META), (torch.ones(6, 4, device=META),)).graph
    assert [(o.name, o.inputs, o.parameters) for o in shapes.operators] == [
        (o.name, o.inputs, o.parameters) for o in real.operators
    ]
    assert [v.tensors for v in shapes.values.values()] == [v.tensors for v in real.values.values()]


def test_outputs_larger_than_any_memory() -> None:
    """The check's loss weighs every element of the output: 2 TB of them."""
    with META:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1 << 36))
    assert len(capture(module, (torch.ones(4, 4, device=META),)).graph) == 2


def test_another_shape_is_still_an_error() -> None:
    class Depends(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Depends.calls += 1
            return super().forward(x)[:, : 2 + Depends.calls % 2]

    with pytest.raises(CaptureError, match=r"should be a torch\.float32 tensor of shape"):
        capture(Depends(4, 8, device=META), (torch.ones(6, 4, device=META),))
