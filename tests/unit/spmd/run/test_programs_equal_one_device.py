"""Every valid program trains as one device does: drawn from the theory, not only the best."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.random_programs import random_program, replicated_program
from helpers.spmd_modules import cases
from helpers.spmd_ranks import random_shares
from helpers.spmd_training import train_divided, train_whole
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from lightning_gpp.spmd.run.export import export_forward

NUM_STEPS = 10


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.hidden(x))) * 2 + x[:, :4]


class Attention(nn.Module):
    """A block of a transformer on embeddings that the output shares."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.norm, self.query_key_value = nn.LayerNorm(8), nn.Linear(8, 24)
        self.out, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        parts = self.query_key_value(self.norm(x)).view(*tokens.shape, 3, 4, 2).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(*tokens.shape, 8))
        x = x + self.down(F.gelu(self.up(x)))
        return x @ self.embed.weight.t()


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3, stride=2)
        self.norm, self.out = nn.BatchNorm2d(6), nn.Linear(36, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.max_pool2d(torch.relu(self.norm(self.first(x))), 1)
        x = self.second(x)
        return {"logits": self.out(x.flatten(1)), "mean": x.mean((1, 2))}


class Towers(nn.Module):
    """Two inputs, products, softmax, concatenation, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 6), nn.Linear(4, 6, bias=False)
        self.out = nn.Linear(12, 3)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = torch.tanh(self.one(a)), self.two(b) * self.scale
        both = torch.cat([left * right, left - right], dim=-1)
        return self.out(both).softmax(-1) + both.sum(-1, keepdim=True)


class Masked(nn.Module):
    """torch's encoder with a mask of padding, which is summed with a causal one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 4, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.encoder(x, mask=causal, src_key_padding_mask=is_padding, is_causal=False)


class Changed(nn.Module):
    """Views are changed, and are read after what they view was changed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.first(x)
        left, row = y[:, :4], y[:, 6]
        y[:, :2] += 1
        y[:, 5] = x[:, 0]
        y[:, 4:][:, 2].mul_(2)
        turned = y.t()
        y[:, 3] = 0
        left[:, 1:3] = x[:, :1]
        row.add_(1)
        y[x.abs().amax(1) > 2, 4] = 0.5
        y.relu_()
        return [self.second(y), left * row[:, None], turned]


def padded(batch: int) -> tuple[Tensor, ...]:
    lengths = torch.randint(1, 6, (batch, 1))
    return torch.randn(batch, 5, 8, dtype=torch.float64), torch.arange(5) >= lengths


def images(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, 7, 7, dtype=torch.float64),)


def again(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Other arguments like some."""
    return tuple(torch.randn_like(a) if a.is_floating_point() else a.flip(0) for a in args)


MODULES = {
    "perceptron": (Perceptron, lambda n: (torch.randn(n, 6, dtype=torch.float64),)),
    "attention": (Attention, lambda n: (torch.randint(0, 12, (n, 5)),)),
    "masked": (Masked, padded),
    "changed": (Changed, lambda n: (torch.randn(n, 6, dtype=torch.float64),)),
    "convolutional": (Convolutional, images),
    "towers": (
        Towers,
        lambda n: (torch.randn(n, 5).double(), torch.randn(n, 4).double()),
    ),
    **{
        name: (lambda module=module: module, lambda _, args=args: again(args))
        for name, (module, args) in cases().items()
        if any(True for _ in module.parameters())
    },
}


def loss(result: Tensor | list[Tensor] | dict[str, Tensor]) -> Tensor:
    """Weighs every element of every result differently."""
    tensors = tree_leaves(result)
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        weights = torch.linspace(-1, 1, tensor.numel(), dtype=torch.float64).view_as(tensor)
        total = total + (tensor * weights).sum() + tensor.square().mean()
    return total


def check(name: str, num_devices: int, seed: int, *, stay: float) -> None:
    make, make_batch = MODULES[name]
    torch.manual_seed(seed)
    draw = random.Random(f"{name} {num_devices} {seed}")
    module = make().double()
    batch_size = draw.choice((4, 5, 7))
    batches = [make_batch(batch_size) for _ in range(NUM_STEPS)]
    exported = export_forward(module, batches[0])
    if num_devices == 0:
        program = replicated_program(exported.graph, 2)
    else:
        shares = random_shares(num_devices, draw)
        program = random_program(exported.graph, shares, draw, stay=stay)
    expected = train_whole(module, batches, loss)
    found = train_divided(module, exported, program, batches, loss)
    for key, tensor in found.items():
        if key in expected:
            torch.testing.assert_close(tensor, expected[key], rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize("name", MODULES)
def test_replicated(name: str) -> None:
    check(name, 0, 0, stay=1.0)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODULES)
def test_drawn_programs(name: str, num_devices: int, seed: int) -> None:
    check(name, num_devices, seed, stay=(0.2, 0.9)[seed % 2])
