"""A module's forward as ATen operators: what is kept, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gpp.spmd.operator_graph import ValueSource
from lightning_gpp.spmd.run.export import ExportError, export_forward


class Everything(nn.Module):
    """Tied parameters, buffers, changes in place, no_grad, constants, nested results."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.norm, self.unread = nn.BatchNorm1d(4), nn.Linear(2, 2)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor, *, scale: float, name: str = "y") -> dict[str, object]:
        y = self.two(self.one(x))
        y += self.shift
        y = F.relu(y, inplace=True)
        with torch.no_grad():
            mean = y.mean()
        y = self.norm(y) * scale + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return {"name": name, "parts": (y.split(2, dim=-1), mean), "count": 3}


def test_tied_parameters_are_one_and_unread_ones_none() -> None:
    exported = export_forward(Everything(), (torch.randn(5, 4),), {"scale": 2.0})
    names = [value.name for value in exported.graph.of_source(ValueSource.PARAMETER)]
    assert "one.weight" in names and "two.weight" not in names
    assert not any(name.startswith("unread") for name in names)


class Decides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class ChangesAPart(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        z, _ = y.split(2, 1)
        y.mul_(3)
        return y.sum() + z.sum()


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


class ChangesItsArgument(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 1
        return x


class ChangesPastGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        with torch.no_grad():
            y[:, 0] = 1
        return y


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Decides(), r"Decides cannot be captured.*torch\.where"),
        (ChangesAPart(), r"in place.*other tensors view; assign the result to a new name"),
        (ChangesItsArgument(), r"in place.*views the input 'x'"),
        (ChangesPastGradients(), r"in place.*in torch.no_grad"),
        (Counts(), r"Counts"),
    ],
    ids=["decides", "part", "argument", "no_grad", "number"],
)
def test_what_cannot_be_captured_says_so(module: nn.Module, text: str) -> None:
    with pytest.raises(ExportError, match=text):
        export_forward(module, (torch.randn(3, 4),))
