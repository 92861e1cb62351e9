"""Seconds until the first step is over, by the number of operators and by phase.

A chain of linear layers of 16 features trains one step of 64 samples on two ranks: processor
seconds of rank 0 while it captures the model, measures it, makes the plan, builds its stages, and
runs that step for the first time. Each number is a training of its own in fresh processes.

    python benchmarks/operators.py --operators 100 1000
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from measuring import leave, of_ranks, parser, quiet, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpp import GraphPipeStrategy

PHASES = {"Capturing the model": "capture", "Measuring the model": "measure", "Planning": "plan"}


class Chain(LightningModule):
    """So many layers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(num_layers)))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: ``(samples, 16)`` to the same."""
        found: Tensor = self.layers(x)
        return found

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The mean square."""
        loss: Tensor = self(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Phases(Callback):
    """Leaves the processor seconds of every phase, of each step and of the whole fit."""

    def __init__(self, folder: str) -> None:
        self.folder, self.start_s, self.ends = folder, time.process_time(), list[float]()
        self.phases: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, what: str, module: LightningModule) -> Iterator[None]:
        """Takes the place of the line that tells of a phase which takes long."""
        start_s = time.process_time()
        yield
        name = PHASES.get(what, what)
        self.phases[name] = self.phases.get(name, 0.0) + time.process_time() - start_s

    def on_train_batch_start(self, *_: Any) -> None:
        """A step begins."""
        self.ends.append(time.process_time())

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """The last one ends."""
        self.ends.append(time.process_time())
        first_s, second_s = (b - a for a, b in zip(self.ends, self.ends[1:]))
        rest_s = first_s - sum(self.phases.values()) - second_s
        found = self.phases | {"build": rest_s, "step": second_s}
        leave(self.folder, trainer.global_rank, found)


def train(num_layers: int, folder: str) -> None:
    """Trains two steps: the second has no phase but the step."""
    quiet()
    phases = Phases(folder)
    vars(importlib.import_module("lightning_gpp.strategy.build"))["waiting_for"] = phases.phase
    strategy = GraphPipeStrategy(num_microbatches=4, cache=False, timeout=600.0)
    batches: Any = DataLoader([torch.randn(64, 16)] * 2, batch_size=None)  # type: ignore[arg-type]
    trainer(strategy, 2, max_steps=2, callbacks=[phases]).fit(Chain(num_layers), batches)


def main() -> None:
    """The command."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--operators", type=int, nargs="+", default=[100, 300, 1000, 3000, 10000]
    )
    shown = False
    for count in arguments.parse_args().operators:
        phases = of_ranks(["--here", count])[0]
        if not shown:
            print(f"{'operators':>10}" + "".join(f"{name:>10}" for name in phases), flush=True)
        shown = True
        print(
            f"{count:>10}" + "".join(f"{second:>10.3g}" for second in phases.values()), flush=True
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        train(int(sys.argv[2]), sys.argv[3])
    else:
        main()
