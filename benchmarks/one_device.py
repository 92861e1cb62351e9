"""Step time on one device: this strategy with one stage against plain Lightning.

Fits of a few hundred steps alternate in one process, with and without the strategy, on the same
model and data. Printed are the medians of the step times and the median, smallest and largest
ratio of neighbouring fits; 1.02 says that the strategy costs 2 %. The same for processor time,
which other work on the machine disturbs less.

    python benchmarks/one_device.py                    # both sizes, one micro-batch
    python benchmarks/one_device.py --microbatches 4
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import warnings
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import torch
from chain import SIZES, Chain, Size, example
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_gpp import GraphPipeStrategy

STEPS = {"small": 150, "large": 6}


class StepTimes(Callback):
    """Times from the end of a step to the end of the next, the first ones left out."""

    def __init__(self, num_warmup: int) -> None:
        self.num_warmup = num_warmup
        self.ends: list[tuple[float, float]] = []

    def on_train_batch_end(self, *args: Any) -> None:
        """Notes the time."""
        self.ends.append((time.perf_counter(), time.process_time()))

    def medians_s(self) -> tuple[float, ...]:
        """Median step time: wall-clock and processor."""
        steps = list(zip(self.ends[self.num_warmup :], self.ends[self.num_warmup + 1 :]))
        return tuple(statistics.median(b[i] - a[i] for a, b in steps) for i in range(2))


def step_s(size: Size, num_steps: int, strategy: Any) -> tuple[float, ...]:
    """Trains once; the median step time: wall-clock and processor."""
    seed_everything(0, verbose=False)
    times = StepTimes(num_warmup=max(1, num_steps // 5))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=num_steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[times],
    )
    batches = [example(size)] * num_steps
    trainer.fit(Chain(size), DataLoader(batches, batch_size=None))
    return times.medians_s()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=[*SIZES, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--microbatches", type=int, default=1)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for name in list(SIZES) if arguments.size == "all" else [arguments.size]:
        size, num_steps = SIZES[name], STEPS[name]
        plain_s, ours_s = [], []
        for _ in range(arguments.rounds):
            plain_s.append(step_s(size, num_steps, "auto"))
            strategy = GraphPipeStrategy(num_microbatches=arguments.microbatches)
            ours_s.append(step_s(size, num_steps, strategy))
        print(
            f"{size.num_layers} layers of {size.width}, {size.batch_size} samples in "
            f"{arguments.microbatches} micro-batches, {arguments.rounds} fits of {num_steps} steps"
        )
        for index, kind in enumerate(("wall-clock", "processor")):
            report(kind, [s[index] for s in plain_s], [s[index] for s in ours_s])


def report(kind: str, plain_s: list[float], ours_s: list[float]) -> None:
    """Prints a line."""
    ratios = [ours / plain for ours, plain in zip(ours_s, plain_s)]
    print(
        f"  {kind}: plain {1e3 * statistics.median(plain_s):.2f} ms, one stage "
        f"{1e3 * statistics.median(ours_s):.2f} ms, ratio {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
