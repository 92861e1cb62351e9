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

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from measuring import leave, parser, quiet, spread, trainer
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader

from lightning_gpp import GraphPipeStrategy

LAYERS, MICROBATCHES = 8, 4


class Size(NamedTuple):
    """Width of every layer, samples of a mini-batch, and steps between two changes."""

    width: int
    batch_size: int
    steps_per_block: int


SIZES = {"small": Size(192, 512, 30), "large": Size(1024, 2048, 2)}


def layers(width: int) -> nn.Sequential:
    """The chain; half of it on each rank."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS))
    )


class Chain(LightningModule):
    """The chain as a user writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = layers(width)

    def forward(self, x: Tensor) -> Tensor:
        """Through all layers; ``(batch, width)`` to the same."""
        return self.layers(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean squared error."""
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Rival:
    """The same training in a bare loop over torch's schedule."""

    def __init__(self, width: int, rank: int, batch: list[Tensor]) -> None:
        half = LAYERS // 2
        part = layers(width)[rank * half : (rank + 1) * half]
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        self.optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
        self.given: Any = ((batch[0],), {}) if rank == 0 else ((), {"target": batch[1]})

    def step(self) -> None:
        """One mini-batch: forward, backward, update."""
        self.schedule.step(*self.given[0], **self.given[1])
        self.optimizer.step()
        self.optimizer.zero_grad()


class Alternate(Callback):
    """Runs a block of the rival's steps after every block of ours, and times both."""

    def __init__(self, rival: Rival, size: Size, folder: str) -> None:
        self.rival, self.size, self.folder = rival, size, folder
        self.found: dict[str, list[tuple[float, float]]] = {"ours": [], "rival": []}

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Changes over at the end of a block."""
        if trainer.global_step % self.size.steps_per_block == 0:
            self._note("ours", is_warm=trainer.global_step > self.size.steps_per_block)
            for _ in range(self.size.steps_per_block):
                self.rival.step()
            self._note("rival", is_warm=trainer.global_step > self.size.steps_per_block)

    def _note(self, name: str, *, is_warm: bool) -> None:
        """Wall-clock and processor seconds per step since the last note."""
        dist.barrier()
        now = time.perf_counter(), time.process_time()
        if is_warm:
            each = ((b - a) / self.size.steps_per_block for a, b in zip(self._since, now))
            self.found[name].append((next(each), next(each)))
        dist.barrier()
        self._since = time.perf_counter(), time.process_time()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the times."""
        leave(self.folder, trainer.global_rank, self.found)


def train(rank: int, size: Size, num_blocks: int, schedule: str | None, folder: str) -> None:
    """One of the two processes."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "benchmark"}
    quiet()
    method = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    seed_everything(0, verbose=False)
    batch = [torch.randn(size.batch_size, size.width) for _ in range(2)]
    strategy = GraphPipeStrategy(
        num_microbatches=MICROBATCHES,
        plan=[
            [f"layers.{i}" for i in range(LAYERS // 2 * k, LAYERS // 2 * (k + 1))] for k in (0, 1)
        ],
        schedule=schedule,
        cluster_environment=TorchElasticEnvironment(),
        timeout=120,
    )
    num_steps = (num_blocks + 1) * size.steps_per_block
    callback = Alternate(Rival(size.width, rank, batch), size, folder)
    trainer(strategy, 2, max_steps=num_steps, max_epochs=-1, callbacks=[callback]).fit(
        Chain(size.width), DataLoader([batch] * num_steps, batch_size=None)
    )


def main() -> None:
    """The command."""
    arguments = parser(__doc__)
    arguments.add_argument("--size", choices=[*SIZES, "all"], default="all")
    arguments.add_argument("--blocks", type=int, default=15)
    arguments.add_argument("--schedule", help="of ours; the default if not given")
    given = arguments.parse_args()
    for name in SIZES if given.size == "all" else [given.size]:
        size = SIZES[name]
        with tempfile.TemporaryDirectory() as folder:
            asked = size, given.blocks, given.schedule, folder
            mp.spawn(train, asked, nprocs=2)  # type: ignore[attr-defined]
            times = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]
        print(
            f"{LAYERS} layers of {size.width}, {size.batch_size} samples in {MICROBATCHES} "
            f"micro-batches, {given.blocks} blocks of {size.steps_per_block}; ms a step:"
        )
        for rank, found in enumerate(times):
            for who, clock in (("wall-clock", 0), ("processor", 1)):
                ours, rival = ([each[clock] for each in found[key]] for key in ("ours", "rival"))
                ms = [1e3 * statistics.median(each) for each in (ours, rival)]
                ratio = spread([a / b for a, b in zip(ours, rival)])
                line = f"ours {ms[0]:8.2f}  Schedule1F1B {ms[1]:8.2f}  ratio {ratio}"
                print(f"  rank {rank}, {who:10}  {line}")


if __name__ == "__main__":
    main()
