"""Forwards that cannot simply be traced or cut: they run as on one device all the same.

Packed sequences cross between stages, ragged bags run in one piece, and modules that decide by the
data, or that are compiled, stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from conformance.case import odd
from conformance.modules import NUM_TARGETS, WIDTH, CaseModule, StepsModule, data

# Packed sequences --------------------------------------------------------------------------------


class PackedModule(StepsModule):
    """Two recurrent networks, with a packed sequence in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(31)
        self.first = nn.LSTM(1, 6, batch_first=True)
        self.second = nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, NUM_TARGETS)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            x.unsqueeze(2), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        outputs, _ = self.second(self.first(packed)[0])
        padded, _ = pad_packed_sequence(outputs, batch_first=True, total_length=WIDTH)
        return self.head(padded.sum(1))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x, lengths_of(x)), y)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0], lengths_of(batch[0]))


class PackedArgumentModule(PackedModule):
    """The forward takes the packed sequence."""

    def forward(self, packed: Any) -> Tensor:
        _, last = self.second(self.first(packed)[0])
        return self.head(last[0])

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        packed = pack_padded_sequence(
            x.unsqueeze(2), lengths_of(x).cpu(), batch_first=True, enforce_sorted=False
        )
        return F.mse_loss(self(packed), y)


def lengths_of(x: Tensor) -> Tensor:
    """A length from 1 to the width for every sample."""
    return 1 + (10 * x[:, 0].abs()).long() % WIDTH


APART = [["first"], ["second", "head"]]

# Ragged bags -------------------------------------------------------------------------------------


class BagsModule(StepsModule):
    """Bags of several lengths as indices and offsets, beside one row per sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(32)
        self.bags = nn.EmbeddingBag(30, 6, mode="sum")
        self.dense, self.head = nn.Linear(WIDTH, 6), nn.Linear(12, NUM_TARGETS)

    def forward(self, x: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        return self.head(torch.cat([self.dense(x), self.bags(indices, offsets)], 1).tanh())

    def loss(self, batch: Any) -> Tensor:
        x, indices, offsets, y = batch
        return F.mse_loss(self(x, indices, offsets), y)


def bags(num_of: Callable[[int], int]) -> Callable[[Sequence[Any]], Any]:
    """Makes batches with so many indices for the bag of a sample."""

    def collate(samples: Sequence[tuple[Tensor, Tensor]]) -> Any:
        rows, targets = (torch.stack(column) for column in zip(*samples, strict=True))
        counts = torch.tensor([num_of(i) for i in range(len(rows))])
        indices = torch.arange(int(counts.sum())) * 7 % 30
        return rows, indices, counts.cumsum(0) - counts, targets

    return collate


BAGS = {
    # As many indices as samples, or a multiple of them: by their sizes they could be cut.
    "one each": bags(lambda i: 1),
    "three each": bags(lambda i: 3),
    "three on average": bags(lambda i: 2 + 2 * (i % 2)),
    "ragged": bags(lambda i: 1 + i % 3),
}

# Decisions on data -------------------------------------------------------------------------------


class Gate(nn.Module):
    """Takes one of two ways by the largest number; the first batch knows one of them only."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        if x.abs().max() > 2.2:
            return self.large(h).tanh()
        return self.small(h)


class Selection(nn.Module):
    """Works on the rows that are selected, if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        for row in (x[:, 0] > 1.5).nonzero()[:, 0]:
            h = h + 0.1 * self.layer(h[row])
        return h


class InnerModule(CaseModule):
    """Something of its own in the middle.

    Args:
        inner: makes it, a function of the hidden values and the input.
    """

    def __init__(self, inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = inner()

    def forward(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():  # a check, which on one device would raise, too
            raise ValueError("x is not finite")
        joined = torch.cat([self.left(x), self.right(x.flip(1))], dim=1)
        return self.head(self.norm(self.inner(self.fuse(joined), x)))


# Modules that torch compiles ---------------------------------------------------------------------


class Plain(nn.Module):
    """Nothing special."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.norm(self.layer(h)).tanh() + x[:, :1]


def scripted() -> nn.Module:
    with torch.jit.optimized_execution(False):
        return torch.jit.script(Plain())


def compiled() -> nn.Module:
    inner = Plain()
    inner.compile(backend="eager")
    return inner


class CompiledModule(CaseModule):
    """Compiled in place, as a whole and a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.left.compile(backend="eager")
        self.compile(backend="eager")


# -------------------------------------------------------------------------------------------------

CASES = [
    odd("packed", PackedModule, strategy={"plan": APART}),
    odd("packed before", PackedArgumentModule, strategy={"plan": APART}, only_whole=True),
    *(
        odd(
            f"bags, {name}", BagsModule, data=data(num_samples=27, collate=collate), only_whole=True
        )
        for name, collate in BAGS.items()
    ),
    odd("a branch on data", lambda: InnerModule(Gate), only_whole=True),
    odd("rows selected by data", lambda: InnerModule(Selection), only_whole=True),
    odd("scripted child", lambda: InnerModule(scripted)),
    odd("child compiled in place", lambda: InnerModule(compiled)),
    odd(
        "child of torch.compile",
        lambda: InnerModule(lambda: torch.compile(Plain(), backend="eager")),
    ),
    odd("compiled in place", CompiledModule),
]
