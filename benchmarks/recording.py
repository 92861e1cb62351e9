"""What recording a step costs: steps with and without it, taken in turns in one run.

    python benchmarks/recording.py --ranks 2 --steps 200 --width 64

Prints the median step time of both kinds on rank 0 and the median of the ratios of neighbours,
with its quartiles. Gathering and drawing come after a step and are not part of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpp import GraphPipeStrategy

WARM_UP = 10


class Chain(pl.LightningModule):
    """Eight linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        """The layers."""
        out: Tensor = self.layers(x)
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """A mean over samples."""
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class InTurns(pl.Callback):
    """Records every other step and times all."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start_s = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Begins a step."""
        if trainer.global_step % 2:
            trainer.strategy.session.run.recorder.start()
        self.start_s = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Ends it, on all ranks at once, so that none runs ahead into the next."""
        self.seconds.append(time.perf_counter() - self.start_s)
        if trainer.strategy.session.run.recorder.is_on:
            trainer.strategy.session.run.recorder.stop()
        trainer.strategy.barrier()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prints on rank 0, which is a process of its own."""
        if trainer.is_global_zero:
            report(self.seconds[WARM_UP:])


def report(seconds: list[float]) -> None:
    """Prints medians and ratios of neighbours."""
    off, on = seconds[0::2], seconds[1::2]
    ratios = [recorded / plain for plain, recorded in zip(off, on)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"step without recording {statistics.median(off) * 1e3:.2f} ms")
    print(f"step with recording    {statistics.median(on) * 1e3:.2f} ms")
    print(f"ratio                  {middle:.3f} (quartiles {low:.3f} to {high:.3f})")


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batch_size = 8 * arguments.microbatches
    num_samples = batch_size * (WARM_UP + arguments.steps)
    trainer = pl.Trainer(
        strategy=GraphPipeStrategy(arguments.microbatches, start_method="spawn"),
        accelerator="cpu",
        devices=arguments.ranks,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[InTurns()],
    )
    data = TensorDataset(torch.randn(num_samples, arguments.width))
    trainer.fit(Chain(arguments.width), DataLoader(data, batch_size))


if __name__ == "__main__":
    main()
