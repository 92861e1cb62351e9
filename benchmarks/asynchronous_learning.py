"""How well asynchronous pipelines learn: validation accuracy for all policies of weights.

The digits of scikit-learn (1,797 pictures of 8 x 8, a quarter of them for validation), a small
residual network of dense layers cut into as many stages as processes, batches of 32. A row is a
policy with an optimizer: mean and spread over the seeds of the best validation accuracy, and
the epochs until 95 % (those of the run and one where it is never reached). ``flush`` is synchronous
training.

    python benchmarks/asynchronous_learning.py --policies flush pipeoptim stash --seeds 3
    python benchmarks/asynchronous_learning.py --devices 4 --epochs 20       # all of them, long
"""

from __future__ import annotations

import argparse
import logging
import statistics
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpp import GraphPipeStrategy
from lightning_gpp.text_table import text_table
from lightning_gpp.weights.policies import POLICIES

BATCH, WIDTH, GOAL = 32, 64, 0.95
OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.01),
}


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """As many features as it takes."""
        out: Tensor = x + self.inner(self.norm(x))
        return out


class Digits(pl.LightningModule):
    """Tells digits."""

    def __init__(self, optimizer: str, num_blocks: int) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.stem = nn.Linear(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Accuracy."""
        hits = (self(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", hits, batch_size=len(batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As asked."""
        return OPTIMIZERS[self.optimizer](self.parameters())


class Best(pl.Callback):
    """Logs the best accuracy, and when it was good enough."""

    def __init__(self, epochs: int) -> None:
        self.found: list[float] = []
        self.epochs = epochs

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """After every epoch."""
        self.found.append(float(trainer.callback_metrics.get("accuracy", 0.0)))
        reached = [i for i, value in enumerate(self.found) if value >= GOAL]
        module.log("best", max(self.found))
        module.log("until", float(reached[0] + 1 if reached else self.epochs + 1))


def fit(policy: str, optimizer: str, seed: int, options: Any) -> tuple[float, float]:
    """Best accuracy and epochs to the goal."""
    pl.seed_everything(seed, verbose=False)
    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x = torch.tensor(pictures, dtype=torch.float32)[order] / 8 - 1
    y = torch.tensor(labels)[order]
    cut = len(y) * 3 // 4
    module = Digits(optimizer, num_blocks=2 * options.devices)
    plan = [[f"blocks.{2 * i}", f"blocks.{2 * i + 1}"] for i in range(options.devices)]
    plan[0].insert(0, "stem")
    plan[-1].append("head")
    accumulated = options.devices - 1 if POLICIES[policy].is_one_behind else 1
    trainer = pl.Trainer(
        strategy=GraphPipeStrategy(
            schedule="1f1b-async", weights=policy, plan=plan, start_method="fork", timeout=120.0
        ),
        devices=options.devices,
        accelerator="cpu",
        max_epochs=options.epochs,
        accumulate_grad_batches=accumulated,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Best(options.epochs)],
    )
    train = DataLoader(
        TensorDataset(x[:cut], y[:cut]), BATCH // accumulated, shuffle=True, drop_last=True
    )
    trainer.fit(module, train, DataLoader(TensorDataset(x[cut:], y[cut:]), 512))
    return float(trainer.callback_metrics["best"]), float(trainer.callback_metrics["until"])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", nargs="+", default=[*POLICIES], choices=[*POLICIES])
    parser.add_argument("--optimizers", nargs="+", default=[*OPTIMIZERS], choices=[*OPTIMIZERS])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_gpp"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rows = []
    for optimizer in options.optimizers:
        for policy in options.policies:
            runs = [fit(policy, optimizer, seed, options) for seed in range(options.seeds)]
            best, until = ([run[i] for run in runs] for i in (0, 1))
            rows.append(
                (
                    optimizer,
                    policy,
                    f"{100 * statistics.mean(best):.2f}",
                    f"{100 * min(best):.2f} to {100 * max(best):.2f}",
                    f"{statistics.mean(until):.1f}",
                )
            )
    print(
        f"digits, {2 * options.devices} blocks on {options.devices} stages, {options.epochs} "
        f"epochs, {options.seeds} seeds, torch {torch.__version__}"
    )
    header = ("optimizer", "policy", "best accuracy, %", "seeds", f"epochs to {GOAL:.0%}")
    print(text_table(header, rows, left=("optimizer", "policy")))


if __name__ == "__main__":
    main()
