"""How often the host waits for its device in a step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from helpers.training import make_trainer, quiet
from helpers.workers import WorkerPool
from torch import Tensor, nn
from torch.utils.data import DataLoader

NUM_STEPS, NUM_STEADY = 10, 4
MOST_PER_STEP = 2
"""With one logged value: one look at what a step leaves behind, and one more."""
CONNECTION = "connection"
"""Not a wait that comes back: NCCL's connections are made once."""


class Blocks(lp.LightningModule):
    """Residual blocks whose loss is logged."""

    def __init__(self, width: int = 32, num_blocks: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            for _ in range(num_blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def training_step(self, batch: Tensor) -> Tensor:
        loss = (self(batch) - batch.sin()).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class CountsWaits(lp.Callback):
    """The waits of each step, by cause."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        from standin_gpus.waits import counts

        self.steps.append(counts())


def count_waits(strategy: dict[str, Any], num_ranks: int, **trainer: Any) -> list[dict[str, int]]:
    """Trains; the waits of the last steps on this rank."""
    counting = CountsWaits()
    with quiet():
        fitted = make_trainer(
            strategy, num_ranks, max_steps=NUM_STEPS, callbacks=[counting], **trainer
        )
        batches = torch.randn(NUM_STEPS, 64, 32, generator=torch.Generator().manual_seed(1))
        fitted.fit(Blocks(), DataLoader(list(batches), batch_size=None))
    return counting.steps[-NUM_STEADY:]


@pytest.mark.parametrize("num_microbatches", [2, 8])
@pytest.mark.parametrize(
    ("trainer", "schedule"),
    [
        ({}, "gpipe"),
        ({}, "1f1b"),
        ({"gradient_clip_val": 0.5}, "gpipe"),
        ({"accelerator": "pool", "devices": ["cuda:0", "cuda:0"]}, "gpipe"),
        ({"accelerator": "pool", "devices": ["cuda:0", "cuda:0"]}, "1f1b"),
    ],
    ids=["nccl-gpipe", "nccl-1f1b", "nccl-clipped", "staged-gpipe", "staged-1f1b"],
)
def test_the_host_hardly_waits(
    gpus: WorkerPool, trainer: dict[str, Any], schedule: str, num_microbatches: int
) -> None:
    strategy = {
        "planner": "balanced",
        "cache": False,
        "schedule": schedule,
        "num_microbatches": num_microbatches,
    }
    for rank, steps in enumerate(gpus.run(count_waits, strategy, 2, num_ranks=2, **trainer)):
        for step in steps:
            waits = Counter(step)
            del waits[CONNECTION]
            assert waits.total() <= MOST_PER_STEP, f"rank {rank}: {dict(waits)}"
