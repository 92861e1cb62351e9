"""One small module of each family of models, and the samples it trains on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

from helpers.models import DataSpec
from helpers.random_models import SupervisedModule

LENGTH = 5


@dataclass(frozen=True)
class FamilyData(DataSpec):
    """Samples with the given inputs and one number as target.

    Attributes:
        inputs: what each input is: ``features``, ``sequence``, ``image``, ``video``, ``padding``,
            ``tokens`` or ``bags``.
    """

    inputs: tuple[str, ...] = ("features",)

    def loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        tensors = [_KINDS[kind](self.num_samples, generator) for kind in self.inputs]
        dtype = getattr(torch, self.dtype)
        tensors = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
        target = torch.randn(self.num_samples, generator=generator, dtype=dtype)
        return DataLoader(TensorDataset(*tensors, target), batch_size=self.batch_size)


def _normal(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda num, generator: torch.randn(num, *shape, generator=generator)


def _whole(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda num, generator: torch.randint(1, 7, (num, *shape), generator=generator)


def _padding(num: int, generator: torch.Generator) -> Tensor:
    lengths = torch.randint(1, LENGTH + 1, (num, 1), generator=generator)
    return torch.arange(LENGTH).expand(num, -1) >= lengths


_KINDS = {
    "features": _normal(4),
    "sequence": _normal(LENGTH, 8),
    "image": _normal(1, 9, 7),
    "video": _normal(3, 1, 4, 4),
    "padding": _padding,
    "tokens": _whole(3),
    "bags": _whole(3, 2),
}


class Family(SupervisedModule):
    """Trains any network on the mean squared error of the mean of what it returns."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.net = build()

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.net(*inputs)

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        *inputs, target = batch
        result = self(*inputs)
        return F.mse_loss(result.flatten(1).mean(1), target), [result]


class LayerTowers(nn.Module):
    """Two towers of encoder layers, one with norms first, joined."""

    def __init__(self) -> None:
        super().__init__()
        layers = functools.partial(
            nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.0, batch_first=True
        )
        self.a = nn.ModuleList(layers() for _ in range(2))
        self.b = nn.ModuleList(layers(norm_first=True) for _ in range(2))
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        y = x
        for layer in self.a:
            x = layer(x, src_key_padding_mask=padding)
        for layer in self.b:
            y = layer(y, src_key_padding_mask=padding)
        return self.head(torch.cat([x, y], 2)).mean(1)


class EncoderTower(nn.Module):
    """A stack that goes over to nested tensors in validation; padded positions count here."""

    def __init__(self, *, norm_first: bool = False, final_norm: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        norm = nn.LayerNorm(8) if final_norm else None
        self.encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=not norm_first)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding)).mean(1)


class EncoderDecoder(nn.Module):
    """``nn.Transformer`` with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(7, 8), nn.Linear(8, 2)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1)).to(x)
        return self.head(self.transformer(x, self.tokens(tokens), tgt_mask=mask))


class Attention(nn.Module):
    """``nn.MultiheadAttention`` with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.query, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        h, _ = self.attention(self.query(x), x, x, key_padding_mask=padding, need_weights=False)
        return self.head(h).mean(1)


class Tables(nn.Module):
    """Embedding tables, bags with padding and interactions."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.tables = nn.ModuleList(nn.Embedding(7, 4) for _ in range(3))
        self.bags = nn.ModuleList(nn.EmbeddingBag(7, 4, padding_idx=1) for _ in range(3))
        self.top = nn.Linear(21, 1)

    def forward(self, x: Tensor, tokens: Tensor, bags: Tensor) -> Tensor:
        columns = [self.dense(x)]
        columns += [table(index) for table, index in zip(self.tables, tokens.unbind(1))]
        columns += [bag(bags[:, number]) for number, bag in enumerate(self.bags)]
        stacked = torch.stack(columns, 1)
        rows, cols = torch.tril_indices(len(columns), len(columns), offset=-1)
        return self.top(torch.bmm(stacked, stacked.transpose(1, 2))[:, rows, cols])


class UNet(nn.Module):
    """Long skips, sizes taken from tensors, a crop."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)])
        self.middle, self.pool = nn.Conv2d(4, 4, 3, padding=1), nn.MaxPool2d(2)
        self.up = nn.ModuleList([nn.Conv2d(8, 3, 3), nn.Conv2d(6, 2, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu_(self.down[0](x))
        b = F.relu_(self.down[1](self.pool(a)))
        h = F.interpolate(self.middle(self.pool(b)), size=b.shape[-2:])
        h = self.up[0](torch.cat([h, b], 1))
        h = F.interpolate(h, size=(a.shape[2] + 2, a.shape[3] + 2))
        top, left = (h.shape[2] - a.shape[2]) // 2, (h.shape[3] - a.shape[3]) // 2
        h = h[:, :, top : top + a.shape[2], left : left + a.shape[3]]
        return self.up[1](torch.cat([h, a], 1))


class Recurrent(nn.Module):
    """LSTM states as tuples between modules, then a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(8, 4, batch_first=True), nn.LSTM(4, 4, batch_first=True)
        self.third, self.head = nn.GRU(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        start = torch.zeros(1, x.size(0), 4, dtype=x.dtype, device=x.device)
        h, state = self.first(x, (start, start))
        h, (last, _) = self.second(h, state)
        h, _ = self.third(h, last)
        return self.head(h[:, -1])


class ConvLstm(nn.Module):
    """A cell in a Python loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
        self.out = nn.Conv2d(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        samples, steps, _, height, width = x.size()
        states = [(x.new_zeros(samples, 2, height, width),) * 2 for _ in self.cells]
        for step in range(steps):
            h = x[:, step]
            for level, cell in enumerate(self.cells):
                states[level] = _cell(cell, h, states[level])
                h = states[level][0]
        return self.out(h)


def _cell(cell: nn.Module, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    h, c = state
    i, f, o, g = torch.split(cell(torch.cat([x, h], 1)), h.shape[1], dim=1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


class InPlace(nn.Module):
    """In-place changes of tensors that others read before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        before = h.sum(1, keepdim=True)
        h = self.relu(h) + h
        h += before
        y = self.b(h.clone())
        y[:, 0] = before[:, 0]
        y[:, 1:3].mul_(2)
        return self.c(self.relu(y)) + F.dropout(y, 0.0, self.training).mean(1, keepdim=True)


class Residual(nn.Module):
    """ResNet's block with a norm that is exact in micro-batches."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.b = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(2, outside) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)
        self.skip = nn.Conv2d(inside, outside, 1, stride) if inside != outside else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[1](self.b(self.relu(self.norms[0](self.a(x)))))
        h += x if self.skip is None else self.skip(x)
        return self.relu(h)


class Inverted(nn.Module):
    """MobileNet's block with squeeze and excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand, self.shrink = nn.Conv2d(width, 8, 1), nn.Conv2d(8, width, 1)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Hardsigmoid())

    def forward(self, x: Tensor) -> Tensor:
        h = F.hardswish(self.depth(F.relu6(self.expand(x))))
        return x + self.shrink(h * self.gate(h))


class Dense(nn.ModuleDict):
    """DenseNet's block."""

    def __init__(self, width: int) -> None:
        super().__init__({str(n): nn.Conv2d(width + 2 * n, 2, 3, padding=1) for n in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(F.relu(layer(torch.cat(features, 1)), inplace=True))
        return torch.cat(features, 1)


def vision() -> nn.Module:
    """Blocks of three families in one line."""
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), Residual(4, 4, 1), Residual(4, 6, 2), Inverted(6), Dense(6)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 2)),
    )


class Experts(nn.Module):
    """Dense routing, tied weights, a normed weight, closures and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = parametrizations.weight_norm(nn.Linear(4, 3))
        self.experts = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for name in "abc"}
        )
        self.experts["c"][0].weight = self.experts["a"][0].weight
        self.experts["b"].register_forward_hook(lambda _, inputs, output: output + inputs[0])
        self.squash = functools.partial(F.leaky_relu, negative_slope=0.3)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        results = torch.stack([self.experts[name](x) for name in "abc"], 1)
        return self.squash(torch.einsum("be,beo->bo", weights, results))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "layer_towers": (LayerTowers, ("sequence", "padding")),
    "encoder": (EncoderTower, ("sequence", "padding")),
    "encoder_norm_first": (
        functools.partial(EncoderTower, norm_first=True),
        ("sequence", "padding"),
    ),
    "encoder_final_norm": (
        functools.partial(EncoderTower, final_norm=True),
        ("sequence", "padding"),
    ),
    "encoder_decoder": (EncoderDecoder, ("sequence", "tokens")),
    "attention": (Attention, ("sequence", "padding")),
    "tables": (Tables, ("features", "tokens", "bags")),
    "u_net": (UNet, ("image",)),
    "recurrent": (Recurrent, ("sequence",)),
    "conv_lstm": (ConvLstm, ("video",)),
    "in_place": (InPlace, ("features",)),
    "vision": (vision, ("image",)),
    "experts": (Experts, ("features",)),
}
"""Network and inputs by name; pass ``FamilyData(inputs=...)`` and ``Family(network)``."""
