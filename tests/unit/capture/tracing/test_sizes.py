"""Sizes of tensors are computed anew for every micro-batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pipelined import assert_partitions_exact, assert_same_on, data
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("error")


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x.view(x.size(0), -1, 6))
        b, n, _ = h.shape
        h = h.reshape(b * n // 2, -1)
        positions = torch.arange(h.shape[1], device=x.device)
        h = self.b(h + positions).view(x.shape[0], -1)
        return h.new_zeros(x.size()[0], 1) + h.unsqueeze(1).expand(-1, x.shape[0] * 2, -1).sum(1)


def test_sizes_are_computed_anew() -> None:
    captured = assert_partitions_exact(Sizes(), data(4, 12))
    assert_same_on(captured, data(6, 12))


class Gpt(nn.Module):
    """Attention written by hand, sizes everywhere, tied embeddings, an optional loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(9, 4), nn.Embedding(8, 4)
        self.qkv, self.head = nn.Linear(4, 12), nn.Linear(4, 9, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        batch, time = ids.size()
        assert time <= 8, f"too long: {time}"
        x = self.tokens(ids) + self.places(torch.arange(time, device=ids.device))
        batch, time, width = x.size()
        q, k, v = (
            part.view(batch, time, 2, width // 2).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        scores = q @ k.transpose(-2, -1) * (1.0 / k.size(-1) ** 0.5)
        scores = scores.masked_fill(self.mask[:time, :time] == 0, float("-inf"))
        x = x + (F.softmax(scores, -1) @ v).transpose(1, 2).contiguous().view(batch, time, width)
        logits = self.head(x)
        if targets is None:
            return logits[:, [-1], :], None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


@pytest.mark.parametrize("with_loss", [False, True])
def test_a_language_model_with_sizes_everywhere(with_loss: bool) -> None:
    ids = torch.randint(0, 9, (4, 6))
    targets = torch.randint(0, 9, (4, 6)) if with_loss else None
    captured = assert_partitions_exact(Gpt(), ids, targets)
    assert all(operator.inputs for operator in captured.graph)
    if not with_loss:
        assert_same_on(captured, torch.randint(0, 9, (3, 5)))
