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


class ChangesAView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        z = y[:, :2]
        y.mul_(3)
        return y.sum() + z.sum()


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


class ChangesASlice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y[:, :2] += 1
        return y


class MaskedEncoder(nn.Module):
    """torch looks whether the mask is causal."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, mask=torch.ones(3, 3, dtype=torch.bool).triu(1))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Decides(), r"Decides cannot be captured.*torch\.where"),
        (ChangesAView(), r"in place.*to a new name"),
        (ChangesASlice(), r"in place.*to a new name"),
        (MaskedEncoder(), r"MaskedEncoder.*is_causal=True or is_causal=False"),
        (Counts(), r"Counts"),
    ],
    ids=["decides", "view", "slice", "mask", "number"],
)
def test_what_cannot_be_captured_says_so(module: nn.Module, text: str) -> None:
    with pytest.raises(ExportError, match=text):
        export_forward(module, (torch.randn(3, 4),))
