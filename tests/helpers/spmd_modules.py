"""Small modules that together have the operators of the theory's table; all numbers float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Encoder(nn.Module):
    """Embedding, fused projections, heads, layer norms, a mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 12)
        self.layer = nn.TransformerEncoderLayer(12, 3, 8, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.embedding(tokens)).mean(1)


class Convolutions(nn.Module):
    """Convolutions, pooling, flattening."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(24, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = F.max_pool2d(F.gelu(self.norm(self.one(image))), 2)
        x = F.adaptive_avg_pool2d(self.two(x), 2) + F.avg_pool2d(x, 2)[:, :1]
        scores = self.head(torch.flatten(x, 1))
        targets = torch.arange(len(image)) % 5
        loss = F.cross_entropy(scores, targets, reduction="sum")
        return F.log_softmax(scores, -1) * loss + F.cross_entropy(scores, targets)


class Experts(nn.Module):
    """A mixture of experts by einsum, top 2, one-hot and running numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(6, 4))
        self.up, self.down = nn.Parameter(torch.randn(4, 6, 5)), nn.Parameter(torch.randn(4, 5, 6))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(torch.einsum("bsm,me->bse", x, self.gate), -1)
        best, which = torch.topk(scores, 2, dim=-1)
        one = F.one_hot(which[..., 0], 4)
        place = torch.cumsum(one, 1) * one
        slots = (place.unsqueeze(-1) == torch.arange(3, device=x.device)).to(x.dtype)
        sent = torch.einsum("bsec,bsm->becm", slots, x)
        hidden = torch.relu(torch.einsum("becm,emh->bech", sent, self.up))
        back = torch.einsum("bech,ehm->becm", hidden, self.down)
        weights = slots * scores.unsqueeze(-1)
        return torch.einsum("bsec,becm->bsm", weights, back) * best.sum(-1, keepdim=True)


class Moves(nn.Module):
    """Views, parts, look-ups, products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
        self.table = nn.Parameter(torch.randn(7, 6))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.reshape(-1, 6), self.weight).view(x.shape)
        one, two = y.chunk(2, dim=-1)
        y = torch.cat([one * 2, two.neg()], dim=-1) - x / 3
        z = torch.stack([y, x], dim=1).permute(0, 2, 1, 3)
        heads = torch.bmm(z.select(2, 0).transpose(1, 2), z[:, :, 1]) @ self.weight.t()
        rows = self.table.index_select(0, index)
        sums = torch.zeros_like(self.table).index_add(0, index, rows * 2)
        picked = torch.gather(sums, 0, index[:, None].expand(-1, 6))
        parts = torch.unbind(heads, 0)
        shown = x.sum((0, 1)).expand(4, 6) + x.mean(dim=-1, keepdim=True)[0, :4]
        shown = torch.where(shown > 0, shown, torch.tanh(shown)).masked_fill(shown > 2, 2.0)
        biggest = torch.amax(heads, -1).unsqueeze(-1).squeeze(-1) + y.var(-1).sum()
        return (picked.sum() + parts[0].sum()) * biggest + shown.mean() + F.silu(x).exp().sum()


class CausalAttention(nn.Module):
    """Attention in other forms: causal, with a mask, with a bias per head."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (3, 4)).transpose(1, 2)
        causal = F.scaled_dot_product_attention(q, q * 2, q + 1, is_causal=True)
        biased = F.scaled_dot_product_attention(q, q * 2, q + 1, attn_mask=self.bias)
        return (causal - biased).transpose(1, 2).flatten(-2)


def cases() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """Modules with arguments; all have dimensions of at least 3 units."""
    torch.manual_seed(0)
    modules = (
        (Encoder(), (torch.randint(0, 9, (4, 5)),)),
        (Convolutions(), (torch.randn(5, 3, 8, 8),)),
        (Experts(), (torch.randn(3, 5, 6),)),
        (Moves(), (torch.randn(4, 5, 6), torch.randint(0, 7, (5,)))),
        (CausalAttention(), (torch.randn(3, 4, 12),)),
    )
    return {
        type(module).__name__: (
            module.double(),
            tuple(a.double() if a.is_floating_point() else a for a in args),
        )
        for module, args in modules
    }
