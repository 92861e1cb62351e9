"""Memory of real processes: the measured peak of every rank beside the one that the plan predicts.

A GPT, a chain and two towers with tables, each planned and trained by processes of this machine,
whose bytes are counted as ``asynchronous_memory.py`` does. The first step, in which the model is
planned, does not count. Weights of the largest rank beside those of the model show what cutting
it saves.

    python benchmarks/memory.py                                       # all, four processes
    python benchmarks/memory.py --models gpt --schedules gpipe 1f1b --devices 2
    python benchmarks/memory.py --models gpt --pipelines 2            # 2 pipelines of 2 ranks
    python benchmarks/memory.py --planner graphpipe                   # with replicas

The planner is ``balanced``, as it cuts a model for every device; on a machine with few cores
``graphpipe`` prefers replicas of the whole model, which need no measuring.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import large_shapes
import lightning.pytorch as pl
import torch
from asynchronous_memory import Memory, only_counted
from large_shapes import Tower
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from lightning_gpp import GraphPipeStrategy
from lightning_gpp.planner import evaluate_plan
from lightning_gpp.text_table import text_table
from lightning_gpp.units_of_measure import bytes_text

SCHEDULES = ("default", "gpipe", "1f1b")
STEPS = 4


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


class SmallGpt(large_shapes.Gpt):
    """Eight layers of width 384."""

    length, vocabulary, hidden = 64, 2000, 384
    num_layers, num_heads = 8, 6


class Gpt(Model):
    """A small one, which learns to repeat its tokens."""

    num_samples = 32

    def __init__(self) -> None:
        super().__init__()
        self.gpt = SmallGpt()

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token."""
        return self.gpt(tokens)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Predicts the same token."""
        (tokens,) = batch
        return functional.cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())

    def sample(self) -> tuple[Tensor, ...]:
        """Tokens."""
        return (torch.arange(self.gpt.length),)


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


class Predicted(Memory):
    """Also what the judge says of every device of the plan."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the files."""
        super().on_train_end(trainer, pl_module)
        if trainer.is_global_zero:
            pipeline = trainer.strategy._session.run.pipeline  # type: ignore[union-attr]
            judged = evaluate_plan(pipeline.planned.plan, pipeline.planned.request)
            found = {
                pipeline.rank_of_device[one.device]: one.memory_bytes for one in judged.devices
            }
            (self.folder / "predicted").write_text(json.dumps(found), encoding="ascii")


def rows(
    name: str, schedule: str, num_devices: int, num_pipelines: int, planner: str
) -> list[list[str]]:
    """Rank by rank."""
    torch.manual_seed(0)
    model = MODELS[name]()
    weights = sum(p.nbytes for p in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            strategy=GraphPipeStrategy(
                num_microbatches=4,
                schedule=None if schedule == "default" else schedule,
                planner=planner,
                pipelines=num_pipelines,
                start_method="spawn",
                timeout=300.0,
            ),
            devices=num_devices,
            accelerator="cpu",
            max_steps=STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Predicted(Path(folder))],
        )
        trainer.fit(model, DataLoader(Same(model), model.num_samples))
        predicted = json.loads((Path(folder) / "predicted").read_text(encoding="ascii"))
        found = []
        for rank in range(num_devices):
            taken = int((Path(folder) / str(rank)).read_text(encoding="ascii"))
            said = predicted[str(rank % (num_devices // num_pipelines))]
            found.append(
                [
                    *(name, schedule, bytes_text(4 * weights), str(rank)),
                    *(bytes_text(said), bytes_text(taken), f"{taken / said - 1:+.1%}"),
                ]
            )
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--pipelines", type=int, default=1)
    parser.add_argument("--planner", default="balanced")
    options = parser.parse_args()
    only_counted(parser)
    print(
        f"{options.devices} processes, {options.pipelines} pipelines, Adam, "
        f"torch {torch.__version__}, {platform.machine()}"
    )
    found = [
        row
        for name in options.models
        for schedule in options.schedules
        for row in rows(name, schedule, options.devices, options.pipelines, options.planner)
    ]
    header = ["model", "schedule", "whole model", "rank", "predicted", "measured", "error"]
    print(text_table(header, found, left={"model", "schedule"}))


if __name__ == "__main__":
    main()
