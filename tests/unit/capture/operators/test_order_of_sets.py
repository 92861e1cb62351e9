"""Forwards that go through a set, whose order is another one in every process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture import CaptureError, capture


class Tables(nn.Module):
    """A table per kind, from what is computed alike for each, as ModernBERT has them."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = kinds
        self.scales = {"full": 2.0, "sliding": 3.0, "none": 5.0}
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        tables = {}
        for kind in self.kinds:
            positions = x.abs().sqrt()
            tables[kind] = (positions * self.scales[kind]).cos()
        y: Tensor = self.head(x * tables["full"] + tables["sliding"])
        return y


def test_another_order_is_the_same_model() -> None:
    torch.manual_seed(0)
    x, one, other = torch.rand(6, 4), Tables(("full", "sliding")), Tables(("sliding", "full"))
    other.load_state_dict(one.state_dict())
    first = capture(one, (x,), {})
    followed = capture(other, (x,), {}, verified=first.verified)
    assert capture(other, (x,), {}).fingerprint != first.fingerprint
    assert followed.fingerprint == first.fingerprint
    assert [op.name for op in followed.graph] == [op.name for op in first.graph]


def test_another_model_is_refused() -> None:
    x, other = torch.rand(6, 4), Tables(("sliding", "full"))
    other.scales["full"] = 7.0
    first = capture(Tables(("full", "sliding")), (x,), {})
    with pytest.raises(CaptureError, match="captured another model than rank 0"):
        capture(other, (x,), {}, verified=first.verified)
