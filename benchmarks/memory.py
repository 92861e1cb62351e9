"""Memory of real processes: the measured peak of every rank beside the one that the plan predicts.

A GPT, a chain and two towers with tables, each planned and trained by processes of this machine. In
every process a mode of torch reads, before and after every operator of every step, how many bytes
glibc has handed out as memory of their own; tensors of more than ``LEAST`` are asked to be among
them, whoever makes them. So the peak is a count, which does not depend on what other processes do
or what the allocator keeps; what an operator holds only while it runs is not in it. Bytes that were
there before training and are no parameters (libraries) are left out, and so is the first step, in
which the model is planned. Weights of the largest rank beside those of the model show what cutting
it saves.

    python benchmarks/memory.py                                       # all, four processes
    python benchmarks/memory.py --models gpt --schedules gpipe 1f1b --devices 2
    python benchmarks/memory.py --models gpt --pipelines 2            # 2 pipelines of 2 ranks
    python benchmarks/memory.py --models chain --schedules 1f1b-async --weights stash

The planner is ``balanced``, as it cuts a model for every device; on a machine with few cores
``graphpipe`` prefers replicas of the whole model, which need no measuring.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from measuring import leave, parser, quiet, trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from lightning_gpp import GraphPipeStrategy
from lightning_gpp.common.text_table import text_table
from lightning_gpp.common.units_of_measure import bytes_text
from lightning_gpp.planner import evaluate_plan
from lightning_gpp.weights.policies import POLICIES

SCHEDULES = ("default", "gpipe", "1f1b", "1f1b-async")
STEPS = 4
LEAST = 2**16
"""Bytes of the smallest tensors that are counted."""


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc; ``hblkhd`` counts blocks of memory of their own."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class Counter(TorchDispatchMode):
    """Counts while it is active.

    Attributes:
        most: bytes at the peak since it was last set.
    """

    def __init__(self) -> None:
        super().__init__()
        libc = ctypes.CDLL(None)
        assert libc.mallopt(-4, 2**20) == 1, "M_MMAP_MAX is not to be set"
        self._read = libc.mallinfo2
        self._read.restype = _MallInfo
        self.most = 0

    def now(self) -> int:
        """Bytes that are handed out."""
        return int(self._read().hblkhd)

    def note(self) -> None:
        """Takes a look."""
        self.most = max(self.most, self.now())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operator runs."""
        self.note()
        result = func(*args, **(kwargs or {}))
        self.note()
        return result


class Model(pl.LightningModule):
    """A mean of squares over what the forward returns, with Adam.

    Attributes:
        num_samples: of a mini-batch.
    """

    num_samples: int

    def sample(self) -> tuple[Tensor, ...]:
        """The inputs of one sample."""
        raise NotImplementedError

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss."""
        return self(*batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Two values for each weight."""
        return torch.optim.Adam(self.parameters(), 1e-4)


class Chain(Model):
    """Sixteen equal layers."""

    num_samples, width = 768, 512

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        """All layers, one after the other."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def sample(self) -> tuple[Tensor, ...]:
        """Features."""
        return (torch.ones(self.width),)


class Block(nn.Module):
    """A layer of a GPT."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention, then two linear operators."""
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Gpt(Model):
    """Eight layers of width 384, which learn to repeat their tokens."""

    num_samples, length, vocabulary, hidden = 32, 64, 2000, 384

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.vocabulary, self.hidden)
        self.layers = nn.ModuleList(Block(self.hidden, 6) for _ in range(8))
        self.norm = nn.LayerNorm(self.hidden)
        self.head = nn.Linear(self.hidden, self.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Predicts the same token."""
        (tokens,) = batch
        return functional.cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())

    def sample(self) -> tuple[Tensor, ...]:
        """Tokens."""
        return (torch.arange(self.length),)


class Tower(nn.Module):
    """Features of a user or an item, each with a table."""

    def __init__(self, num_tables: int, num_rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(num_rows, width) for _ in range(num_tables))
        self.layers = nn.Sequential(
            nn.Linear(num_tables * width, hidden),
            *[nn.Sequential(nn.ReLU(), nn.Linear(hidden, hidden)) for _ in range(4)],
        )

    def forward(self, indices: Tensor) -> Tensor:
        """A vector for each sample."""
        rows = [table(indices[:, i]) for i, table in enumerate(self.tables)]
        return self.layers(torch.cat(rows, dim=1))


class TwoTower(Model):
    """Two times four tables of 30,000 rows of 64 numbers."""

    num_samples, num_tables, bag = 1024, 4, 8

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = (Tower(self.num_tables, 30_000, 64, 512) for _ in range(2))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """How well users and items fit."""
        return (self.user(users) * self.item(items)).sum(dim=1)

    def sample(self) -> tuple[Tensor, ...]:
        """Rows of users and of items."""
        rows = torch.arange(self.num_tables * self.bag).reshape(self.num_tables, self.bag)
        return rows, rows


MODELS = {"chain": Chain, "gpt": Gpt, "two_tower": TwoTower}


class Same(Dataset[Any]):
    """Samples that take no memory while they wait."""

    def __init__(self, model: Model) -> None:
        self.sample, self.count = model.sample(), (STEPS + 1) * model.num_samples

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.sample


class Memory(pl.Callback):
    """Every rank leaves its peak; rank 0 also what is predicted for each rank of its pipeline."""

    def __init__(self, folder: str) -> None:
        self.folder, self.others = folder, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Counting begins."""
        self.counter = Counter()
        held = sum(p.untyped_storage().nbytes() for p in pl_module.parameters() if not p.is_meta)
        self.others = self.counter.now() - held
        self.counter.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """The first step, in which the model is planned, does not count."""
        if trainer.global_step <= 1:
            self.counter.most = 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leaves the numbers."""
        self.counter.__exit__(None, None, None)
        predicted: dict[int, float] = {}
        if trainer.is_global_zero:
            pipeline = trainer.strategy._session.run.pipeline  # type: ignore[attr-defined]
            judged = evaluate_plan(pipeline.planned.plan, pipeline.planned.request)
            predicted = {
                pipeline.rank_of_device[one.device]: one.memory_bytes for one in judged.devices
            }
        leave(self.folder, trainer.global_rank, (self.counter.most - self.others, predicted))


def rows(name: str, schedule: str, given: argparse.Namespace) -> list[list[str]]:
    """Rank by rank."""
    torch.manual_seed(0)
    model = MODELS[name]()
    weights = sum(p.nbytes for p in model.parameters())
    options: dict[str, Any] = {"num_microbatches": 4, "schedule": schedule}
    if schedule == "1f1b-async":
        options = {"schedule": schedule, "weights": given.weights}
    elif schedule == "default":
        options["schedule"] = None
    strategy = GraphPipeStrategy(
        planner=given.planner,
        pipelines=given.pipelines,
        start_method="spawn",
        timeout=300.0,
        **options,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer(strategy, given.devices, max_steps=STEPS, callbacks=[Memory(folder)]).fit(
            model, DataLoader(Same(model), model.num_samples)
        )
        left = [json.loads(Path(folder, f"{r}.json").read_text()) for r in range(given.devices)]
    found, predicted = [], left[0][1]
    for rank, (taken, _) in enumerate(left):
        said = predicted[str(rank % (given.devices // given.pipelines))]
        numbers = bytes_text(said), bytes_text(taken), f"{taken / said - 1:+.1%}"
        found.append([name, schedule, bytes_text(4 * weights), str(rank), *numbers])
    return found


def main() -> None:
    """Prints the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES[:3])
    arguments.add_argument("--weights", default="pipeoptim", choices=[*POLICIES], help="1f1b-async")
    arguments.add_argument("--devices", type=int, default=4)
    arguments.add_argument("--pipelines", type=int, default=1)
    arguments.add_argument("--planner", default="balanced")
    given = arguments.parse_args()
    quiet()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(LEAST)  # of the processes that begin now
    print(
        f"{given.devices} processes, {given.pipelines} pipelines, Adam, "
        f"torch {torch.__version__}, {platform.machine()}"
    )
    found = [
        r for name in given.models for each in given.schedules for r in rows(name, each, given)
    ]
    header = ["model", "schedule", "whole model", "rank", "predicted", "measured", "error"]
    print(text_table(header, found, left={"model", "schedule"}))


if __name__ == "__main__":
    main()
