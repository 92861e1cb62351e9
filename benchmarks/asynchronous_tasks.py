"""What small pipelines learn: data sets, and nets of eight blocks that are cut into stages.

The digits of scikit-learn with a small convolutional net and a small Transformer; mfeat (six views
of digits, joined) and Adult (8,000 people of it) with residual nets, from ``LIGHTNING_GPP_DATA``.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

NUM_BLOCKS = 8
Data = tuple[Tensor, Tensor]


class Residual(nn.Module):
    """A block that adds what it finds to its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """As many features as it takes."""
        out: Tensor = x + self.inner(x)
        return out


class Attention(nn.Module):
    """Self-attention of four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of ``(samples, tokens, width)``."""
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = self.out(found)
        return out


class Tokens(nn.Module):
    """The rows of a picture as tokens, with their places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.places = nn.Parameter(torch.randn(8, width) / 10)

    def forward(self, x: Tensor) -> Tensor:
        """``(samples, 1, 8, 8)`` to ``(samples, 8, width)``."""
        out: Tensor = self.embed(x.squeeze(1)) + self.places
        return out


class Mean(nn.Module):
    """The mean of the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """``(samples, features)``."""
        return x.mean(1)


def conv_net() -> list[nn.Module]:
    """Residual convolutions of 16 channels."""
    blocks = [
        Residual(
            nn.Sequential(
                nn.GroupNorm(4, 16),
                nn.Conv2d(16, 16, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(16, 16, 3, padding=1),
            )
        )
        for _ in range(NUM_BLOCKS)
    ]
    last = nn.Sequential(nn.GroupNorm(4, 16), nn.Flatten())
    return with_ends(nn.Conv2d(1, 16, 3, padding=1), blocks, last, 16 * 64)


def transformer() -> list[nn.Module]:
    """Pre-norm blocks of width 32 on eight tokens."""
    width = 32
    blocks = [
        nn.Sequential(
            Residual(nn.Sequential(nn.LayerNorm(width), Attention(width))),
            Residual(
                nn.Sequential(
                    nn.LayerNorm(width),
                    nn.Linear(width, 2 * width),
                    nn.GELU(),
                    nn.Linear(2 * width, width),
                )
            ),
        )
        for _ in range(NUM_BLOCKS)
    ]
    return with_ends(Tokens(width), blocks, nn.Sequential(nn.LayerNorm(width), Mean()), width)


def dense_net(num_features: int, num_classes: int) -> list[nn.Module]:
    """Residual layers of width 64."""
    width = 64
    blocks = [
        Residual(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
            )
        )
        for _ in range(NUM_BLOCKS)
    ]
    return with_ends(
        nn.Linear(num_features, width), blocks, nn.LayerNorm(width), width, num_classes
    )


def with_ends(
    stem: nn.Module, blocks: Sequence[nn.Module], last: nn.Module, width: int, classes: int = 10
) -> list[nn.Module]:
    """The blocks, the first and the last of them with what comes before and after."""
    head = nn.Sequential(blocks[-1], last, nn.Linear(width, classes))
    return [nn.Sequential(stem, blocks[0]), *blocks[1:-1], head]


@dataclass(frozen=True, slots=True)
class Task:
    """What is learned.

    Attributes:
        read: gives inputs and classes.
        net: makes the blocks for a sample of each.
        epochs: of a run.
        goal: accuracy.
    """

    read: Callable[[], Data]
    net: Callable[[Data], list[nn.Module]]
    epochs: int
    goal: float


def digits() -> Data:
    """Pictures of 8 x 8."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    x = torch.tensor(pictures, dtype=torch.float32) / 8 - 1
    return x.view(-1, 1, 8, 8), torch.tensor(labels)


def mfeat() -> Data:
    """All six views in one row, to mean 0 and deviation 1."""
    folder = Path(os.environ["LIGHTNING_GPP_DATA"]) / "mfeat"
    views = []
    for name in ("fac", "fou", "kar", "mor", "pix", "zer"):
        rows = read_csv(folder / f"mfeat-{name}.csv")[1:]
        views.append(torch.tensor([[float(value) for value in row] for row in rows]))
    features = torch.cat([view[:, :-1] for view in views], 1)
    return standardized(features), views[0][:, -1].long() - int(views[0][:, -1].min())


def adult() -> Data:
    """Numbers to mean 0 and deviation 1, other columns one-hot."""
    rows = read_csv(Path(os.environ["LIGHTNING_GPP_DATA"]) / "adult" / "adult.csv")[1:8001]
    columns = []
    for values in list(zip(*rows, strict=True))[:-1]:
        if all(value.strip().lstrip("-").isdigit() for value in values):
            columns.append(standardized(torch.tensor([[float(value)] for value in values])))
        else:
            kinds = {kind: number for number, kind in enumerate(sorted(set(values)))}
            columns.append(F.one_hot(torch.tensor([kinds[value] for value in values])).float())
    return torch.cat(columns, 1), torch.tensor([int(row[-1].strip() == ">50K") for row in rows])


def read_csv(path: Path) -> list[list[str]]:
    """Its rows."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def standardized(features: Tensor) -> Tensor:
    """Columns of mean 0 and deviation 1."""
    return (features - features.mean(0)) / features.std(0).clamp(min=1e-6)


def dense(data: Data) -> list[nn.Module]:
    """The net for a table."""
    return dense_net(data[0].shape[1], int(data[1].max()) + 1)


TASKS: Mapping[str, Task] = {
    "conv": Task(digits, lambda data: conv_net(), epochs=8, goal=0.97),
    "transformer": Task(digits, lambda data: transformer(), epochs=12, goal=0.93),
    "mfeat": Task(mfeat, dense, epochs=6, goal=0.98),
    "adult": Task(adult, dense, epochs=4, goal=0.845),
}
OPTIMIZERS: Mapping[str, tuple[Callable[..., Optimizer], Sequence[float]]] = {
    "momentum": (lambda p, lr: SGD(p, lr, momentum=0.9), (0.003, 0.01, 0.03)),
    "adam": (lambda p, lr: Adam(p, lr), (0.0005, 0.001, 0.003)),
    "adamw": (lambda p, lr: AdamW(p, lr, weight_decay=0.01), (0.0005, 0.001, 0.003)),
}
