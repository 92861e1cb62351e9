"""Step time of a two-stage chain: this strategy against torch's own 1F1B schedule.

Two processes train the same layers on the same data in turns: a block of steps under a Lightning
Trainer with ``GraphPipeStrategy``, then a block of steps of ``torch.distributed.pipelining``'s
``Schedule1F1B`` in a bare loop (no Trainer, no data loader, no logging), with the same division and
the same micro-batches, and so on, inside one ``fit``. What is printed are medians of the blocks and
the median, smallest and largest ratio of neighbouring blocks; a ratio below 1 says that ours is
faster. Ours includes Lightning's loop, the data loader and the optimizer step.

    python benchmarks/chain.py                  # both sizes
    python benchmarks/chain.py --size small --blocks 20
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader

from lightning_gpp import GraphPipeStrategy


@dataclass(frozen=True)
class Size:
    """What is trained.

    Attributes:
        width: of every layer.
        num_layers: in the chain; half of them on each rank.
        batch_size: samples of a mini-batch.
        num_microbatches: that it is cut into.
        steps_per_block: steps between two changes.
    """

    width: int
    num_layers: int
    batch_size: int
    num_microbatches: int
    steps_per_block: int


SIZES = {
    "small": Size(width=192, num_layers=8, batch_size=512, num_microbatches=4, steps_per_block=30),
    "large": Size(width=1024, num_layers=8, batch_size=2048, num_microbatches=4, steps_per_block=2),
}


def layers(size: Size) -> nn.Sequential:
    """The chain."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(size.width, size.width), nn.ReLU())
            for _ in range(size.num_layers)
        )
    )


def example(size: Size) -> tuple[Tensor, Tensor]:
    """Inputs and targets ``(batch_size, width)``."""
    return torch.randn(size.batch_size, size.width), torch.randn(size.batch_size, size.width)


class Chain(LightningModule):
    """The chain as a user writes it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layers = layers(size)

    def forward(self, x: Tensor) -> Tensor:
        """Through all layers; ``(batch, width)`` to ``(batch, width)``."""
        y: Tensor = self.layers(x)
        return y

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean squared error."""
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Schedule1F1BLoop:
    """The same training in a bare loop over torch's schedule."""

    def __init__(self, size: Size, rank: int) -> None:
        half = size.num_layers // 2
        part = layers(size)[rank * half : (rank + 1) * half]
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, size.num_microbatches, loss_fn=nn.functional.mse_loss)
        self.optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
        self.x, self.y = example(size)
        self.rank = rank

    def step(self) -> None:
        """One mini-batch: forward, backward, update."""
        if self.rank == 0:
            self.schedule.step(self.x)
        else:
            self.schedule.step(target=self.y)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Alternate(Callback):
    """Runs a block of the rival's steps after every block of ours, and times both."""

    def __init__(self, rival: Schedule1F1BLoop, size: Size) -> None:
        self.rival = rival
        self.size = size
        self.ours_s: list[float] = []
        self.rival_s: list[float] = []
        self.ours_cpu_s: list[float] = []
        self.rival_cpu_s: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Changes over at the end of a block."""
        if trainer.global_step % self.size.steps_per_block:
            return
        is_warm = trainer.global_step > self.size.steps_per_block
        if is_warm:
            self._note(self.ours_s, self.ours_cpu_s)
        self._mark()
        for _ in range(self.size.steps_per_block):
            self.rival.step()
        if is_warm:
            self._note(self.rival_s, self.rival_cpu_s)
        self._mark()

    def _mark(self) -> None:
        dist.barrier()
        self._start_s, self._start_cpu_s = time.perf_counter(), time.process_time()

    def _note(self, wall_s: list[float], cpu_s: list[float]) -> None:
        """Wall-clock and processor seconds per step since the mark."""
        dist.barrier()
        steps = self.size.steps_per_block
        wall_s.append((time.perf_counter() - self._start_s) / steps)
        cpu_s.append((time.process_time() - self._start_cpu_s) / steps)


def train(rank: int, size: Size, num_blocks: int, schedule: str | None, folder: str) -> None:
    """One of the two processes."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "benchmark",
    }
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    seed_everything(0, verbose=False)
    callback = Alternate(Schedule1F1BLoop(size, rank), size)
    half = size.num_layers // 2
    rows = [[f"layers.{i}" for i in range(start, start + half)] for start in (0, half)]
    num_steps = (num_blocks + 1) * size.steps_per_block
    trainer = Trainer(
        strategy=GraphPipeStrategy(
            num_microbatches=size.num_microbatches,
            plan=rows,
            schedule=schedule,
            cluster_environment=TorchElasticEnvironment(),
            timeout=120,
        ),
        accelerator="cpu",
        devices=2,
        max_steps=num_steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    batches = [example(size)] * num_steps  # already collated: reading data is not what is measured
    trainer.fit(Chain(size), DataLoader(batches, batch_size=None))
    torch.save(
        {k: v for k, v in callback.__dict__.items() if k.endswith("_s")},
        Path(folder) / f"times-{rank}.pt",
    )


def report(size: Size, times: list[dict[str, Any]]) -> None:
    """Prints medians and ratios."""
    ours_s, rival_s = times[0]["ours_s"], times[0]["rival_s"]
    ratios = [a / b for a, b in zip(ours_s, rival_s)]
    print(
        f"{size.num_layers} layers of {size.width}, {size.batch_size} samples in "
        f"{size.num_microbatches} micro-batches, {len(ratios)} blocks of {size.steps_per_block}:"
    )
    print(f"  ours         {1e3 * statistics.median(ours_s):9.2f} ms a step")
    print(f"  Schedule1F1B {1e3 * statistics.median(rival_s):9.2f} ms a step")
    print(
        f"  ratio        {statistics.median(ratios):9.3f}  ({min(ratios):.3f} to {max(ratios):.3f})"
    )
    for rank, each in enumerate(times):
        ours_ms, rival_ms = (
            1e3 * statistics.median(each[key]) for key in ("ours_cpu_s", "rival_cpu_s")
        )
        print(
            f"  processor time of rank {rank}: ours {ours_ms:.2f} ms, "
            f"Schedule1F1B {rival_ms:.2f} ms"
        )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=[*SIZES, "all"], default="all")
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--schedule", help="of ours; the default if not given")
    arguments = parser.parse_args()
    names = list(SIZES) if arguments.size == "all" else [arguments.size]
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            given = SIZES[name], arguments.blocks, arguments.schedule, folder
            mp.spawn(train, given, nprocs=2)
            times = [
                torch.load(Path(folder) / f"times-{rank}.pt", weights_only=False)
                for rank in range(2)
            ]
        report(SIZES[name], times)


if __name__ == "__main__":
    main()
