"""What the benchmarks share: quiet trainers, times of steps, processes of their own, ratios."""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import lightning.pytorch as pl
import torch

LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning_gpp")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Of a command whose help is its module's text as it stands."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=form)


def quiet() -> None:
    """One thread for every process, and no word of Lightning or of ours."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def trainer(strategy: Any, devices: int = 1, **options: Any) -> pl.Trainer:
    """A Trainer that does nothing beside training."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    given = {"accelerator": "cpu"} | dict.fromkeys(off, False) | options
    return pl.Trainer(strategy=strategy, devices=devices, **given)


class StepTimes(pl.Callback):
    """Notes when steps begin, by the wall clock and by the processor's.

    Args:
        num_warmup: steps that do not count.
        folder: where every rank leaves its times, as it may be a process of its own.
    """

    def __init__(self, num_warmup: int, folder: str | Path | None = None) -> None:
        self.num_warmup, self.folder = num_warmup, folder
        self.begun: list[tuple[float, float]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """A step begins where the one before it ends."""
        self.begun.append((time.perf_counter(), time.process_time()))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The last step ends."""
        self.on_train_batch_start()
        if self.folder is not None:
            leave(self.folder, trainer.global_rank, [self.steps(0), self.steps(1)])

    def steps(self, clock: int = 0) -> list[float]:
        """Seconds of every step that counts; clock 1 is the processor's."""
        ends = [each[clock] for each in self.begun[self.num_warmup :]]
        return [b - a for a, b in zip(ends, ends[1:])]


def leave(folder: str | Path, rank: int, value: Any) -> None:
    """Leaves a value for :func:`of_ranks`."""
    Path(folder, f"{rank}.json").write_text(json.dumps(value), encoding="utf-8")


def of_ranks(arguments: Sequence[object], num_ranks: int = 1, **variables: str) -> list[Any]:
    """What every rank left, of a fit for which this script is called again.

    Args:
        arguments: of the script, in front of the folder for what ranks leave.
        num_ranks: how many leave something.
        variables: of the environment.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, sys.argv[0], *map(str, arguments), folder]
        done = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(num_ranks)]


def spread(values: Sequence[float]) -> str:
    """The median, and between which values it lies."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
