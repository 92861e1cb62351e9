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

NUM_STEPS, NUM_STEADY = 14, 4
"""Of the 2nd, 4th, 8th step and so on, the losses of ``1f1b`` are checked, which takes longer."""
STAGING = ("send-", "receive-")
"""Names of the threads that stage messages beside the step."""
MOST_PER_STEP = 2
"""With one logged value: one look at what a step leaves behind, and one more."""


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


class Words(Blocks):
    """The same for numbers of words, some of which are padding."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(width)
        self.embedding, self.head = nn.Embedding(50, width), nn.Linear(width, 50)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(super().forward(self.embedding(words)))

    def training_step(self, batch: Tensor) -> Tensor:
        scores = self(batch[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss


class TensorRate(Blocks):
    """The learning rate is a tensor on the device, as for CUDA graphs."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        rate = torch.tensor(1e-3, device=self.trainer.strategy.root_device)
        return torch.optim.AdamW(self.parameters(), lr=rate, capturable=True)


class NotesWaits(lp.Callback):
    """Where this rank's step waits, in the last steps of a training.

    Waits of the package's own threads beside the step, which stage messages, are no waits of it;
    those of the backward are, whose threads are torch's.
    """

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def on_train_batch_end(self, trainer: lp.Trainer, *_: Any) -> None:
        from standin_gpus.waits import sites

        if trainer.global_step == NUM_STEPS - NUM_STEADY:
            self._sites = sites()
            self._noted = self._sites.__enter__()
        elif trainer.global_step == NUM_STEPS:
            self._sites.__exit__(None, None, None)
            for site, number in self._noted.items():
                if not site.thread.startswith(STAGING):
                    self.found[f"{site.cause} {site.operator} {site.lines}"] += number


def note_waits(
    build: type[Blocks], strategy: dict[str, Any], num_ranks: int, **trainer: Any
) -> Counter[str]:
    """Trains; the waits of the last steps on this rank, by line."""
    notes = NotesWaits()
    with quiet():
        fitted = make_trainer(
            strategy, num_ranks, max_steps=NUM_STEPS, callbacks=[notes], **trainer
        )
        batches = torch.randn(NUM_STEPS, 64, 32, generator=torch.Generator().manual_seed(1))
        if build is Words:
            batches = (batches * 25).long().clamp(0, 49)
        fitted.fit(build(), DataLoader(list(batches), batch_size=None))
    return notes.found


def check_waits(found: list[Counter[str]]) -> None:
    for rank, waits in enumerate(found):
        shown = "\n".join(f"{number / NUM_STEADY} {line}" for line, number in waits.items())
        assert waits.total() <= MOST_PER_STEP * NUM_STEADY, f"per step of rank {rank}:\n{shown}"


CLIPPED = {"gradient_clip_val": 0.5}
SCALED = {"precision": "16-mixed", **CLIPPED}
STAGED = {"accelerator": "pool", "devices": ["cuda:0", "cuda:0"]}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("num_microbatches", [2, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("build", [Blocks, Words])
@pytest.mark.parametrize(
    "trainer", [{}, CLIPPED, SCALED, STAGED], ids=["nccl", "clipped", "scaled", "staged"]
)
def test_the_host_hardly_waits(
    gpus: WorkerPool,
    trainer: dict[str, Any],
    build: type[Blocks],
    schedule: str,
    num_microbatches: int,
) -> None:
    strategy = {
        "planner": "balanced",
        "cache": False,
        "schedule": schedule,
        "num_microbatches": num_microbatches,
    }
    check_waits(gpus.run(note_waits, build, strategy, 2, num_ranks=2, **trainer))


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-async"])
def test_a_learning_rate_on_the_device_is_read_once(gpus: WorkerPool, schedule: str) -> None:
    strategy: dict[str, Any] = {"planner": "balanced", "cache": False, "schedule": schedule}
    strategy["num_microbatches"] = 1 if schedule == "1f1b-async" else 2
    check_waits(gpus.run(note_waits, TensorRate, strategy, 2, num_ranks=2))
