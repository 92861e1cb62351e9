"""User code that queues its work on a stream of its own, as on one device."""

from __future__ import annotations

import os

import lightning.pytorch as lp
import pytest
import torch
from helpers.training import make_trainer, quiet, real_tensors
from helpers.workers import WorkerPool
from torch import Tensor, nn
from torch.utils.data import DataLoader

SLOW = 40
"""Operators, so many that a stream which does not wait for them is ahead of them."""


class OnStreams(lp.LightningModule):
    """Its step does something slow before and after the forward.

    Args:
        has_own: whether the step calls the forward on a stream of its own.
    """

    def __init__(self, *, has_own: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        self.has_own = has_own

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        for _ in range(SLOW):
            batch = batch + 0.01
        return batch

    def training_step(self, batch: Tensor) -> Tensor:
        caller = torch.cuda.current_stream(batch.device)
        stream = torch.cuda.Stream(batch.device) if self.has_own else caller
        stream.wait_stream(caller)
        batch.record_stream(stream)
        with torch.cuda.stream(stream):
            out = self(batch)
            for _ in range(SLOW):
                out = out * 1.01
        caller.wait_stream(stream)
        out.record_stream(caller)
        return out.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(schedule: str, where: str) -> dict[str, Tensor]:
    """Trains; the weights on this rank."""
    strategy = {"planner": "balanced", "num_microbatches": 2, "schedule": schedule, "cache": False}
    module = OnStreams(has_own=where == "step")
    device = torch.device("cuda", int(os.environ["RANK"]))
    stream = torch.cuda.Stream(device) if where == "fit" else None
    batches = list(torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1)))
    with quiet(), torch.cuda.stream(stream):
        trainer = make_trainer(strategy, 2, max_steps=4)
        trainer.fit(module, DataLoader(batches, batch_size=None))
    return {name: tensor.cpu() for name, tensor in real_tensors(module).items()}


@pytest.mark.parametrize(
    ("schedule", "where"), [("1f1b", "fit"), ("gpipe", "fit"), ("gpipe", "step")]
)
def test_they_make_no_difference(gpus: WorkerPool, schedule: str, where: str) -> None:
    expected = gpus.run(fit, schedule, "default", num_ranks=2)[0]
    found = gpus.run(fit, schedule, where, num_ranks=2)[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_a_step_of_every_micro_batch_has_none_of_its_own(gpus: WorkerPool) -> None:
    outcomes = gpus.outcomes(fit, "1f1b", "step", num_ranks=2)
    assert all("on a stream of its own" in each.error for each in outcomes)
