"""How true the verdict is: what it says after some batches beside what batches go on to take.

Every recipe trains on processes of this machine (``--ranks``), nothing known of earlier runs, and
then in one process with as many threads. Columns:

- planned: a step by the plan, from operators and messages alone, and how far it is from a batch;
- said: what a batch takes, as the verdict says it (median of the first second of batches);
- batch: the median of the batches after those, and how far what was said is from it;
- one process, said: what the verdict says of one process, from the measured operators and
  the rest of a batch;
- one process: its median batch, and how far what was said is from it.

    python benchmarks/verdict.py
    python benchmarks/verdict.py --recipes dlrm --batches 200
    python benchmarks/verdict.py --busy 1  # beside so many processes that compute all the time
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra import compose, initialize_config_module
from lightning.pytorch.strategies import Strategy

from lightning_gpp import GraphPipeStrategy
from lightning_gpp.jobs.train import build_recipe
from lightning_gpp.strategy.report import verdict_on

WARM_UP = 20
"""Batches before the first that counts, at least."""


class Batches(pl.Callback):
    """Notes when batches begin; rank 0, which may be a process of its own, leaves times in a file.

    Args:
        cells: the file.
    """

    def __init__(self, cells: Path) -> None:
        self.cells = cells
        self.begun_s: list[float] = []
        self.num_before = WARM_UP

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """A batch begins."""
        self.begun_s.append(time.monotonic())
        strategy = trainer.strategy
        if isinstance(strategy, GraphPipeStrategy) and strategy._reports.batch_times is None:
            self.num_before = max(WARM_UP, len(self.begun_s))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes what batches took, and what was said of them."""
        if not trainer.is_global_zero:
            return
        counted = self.begun_s[self.num_before :]
        times_s = [statistics.median(b - a for a, b in zip(counted, counted[1:], strict=False))]
        strategy = trainer.strategy
        if isinstance(strategy, GraphPipeStrategy):
            times, run = strategy._reports.batch_times, strategy.session.run
            assert times is not None and run.pipeline is not None
            assert run.pipeline.planned is not None
            verdict = verdict_on(run.pipeline.planned, strategy.settings)
            one_s = times.alone_s(verdict.one_device_s)
            assert one_s is not None
            times_s += [verdict.step_s, times.batch_s, one_s]
        self.cells.write_text(json.dumps(times_s), encoding="utf-8")


def train(recipe: str, strategy: Strategy | str, num_ranks: int, num_batches: int) -> list[float]:
    """Trains a recipe; seconds of a batch, and what was said of them."""
    with initialize_config_module("lightning_gpp.configs", version_base=None):
        config = compose("config", [f"recipe={recipe}"])
    module, data = build_recipe(config)
    with tempfile.TemporaryDirectory() as folder:
        cells = Path(folder) / "cells"
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=num_ranks,
            max_steps=num_batches,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Batches(cells)],
        )
        trainer.fit(module, datamodule=data)
        found: list[float] = json.loads(cells.read_text(encoding="utf-8"))
        return found


def beside(said_s: float, took_s: float) -> str:
    """How far what was said is from what it took."""
    return f"({(said_s / took_s - 1) * 100:+.0f} %)"


def row(recipe: str, num_ranks: int, num_batches: int) -> str:
    """Trains a recipe both ways; its row."""
    strategy = GraphPipeStrategy(start_method="spawn", cache=False)
    batch_s, planned_s, said_s, one_said_s = train(recipe, strategy, num_ranks, num_batches)
    (one_s,) = train(recipe, "auto", 1, num_batches)
    ms = [f"{each * 1e3:.1f}" for each in (planned_s, said_s, batch_s, one_said_s, one_s)]
    ms[0] += f" {beside(planned_s, batch_s)}"
    ms[2] += f" {beside(said_s, batch_s)}"
    ms[4] += f" {beside(one_said_s, one_s)}"
    return f"| `{recipe}` | {' | '.join(ms)} |"


def compute() -> None:
    """Without end."""
    while True:
        pass


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = ("multimodal", "dlrm", "gnn")
    parser.add_argument("--recipes", nargs="+", choices=names, default=[*names])
    parser.add_argument("--batches", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--busy", type=int, default=0)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {arguments.ranks} "
        f"processes with 1 thread each on {os.cpu_count()} cores, {arguments.busy} others; ms\n"
    )
    busy = [multiprocessing.Process(target=compute, daemon=True) for _ in range(arguments.busy)]
    for process in busy:
        process.start()
    rows = [row(recipe, arguments.ranks, arguments.batches) for recipe in arguments.recipes]
    for process in busy:
        process.kill()
    print("| recipe | planned | said | batch | one process, said | one process |")
    print("|---|---|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
