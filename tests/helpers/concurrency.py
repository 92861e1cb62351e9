"""A two-tower model whose towers take their time, trained with every action recorded."""

from __future__ import annotations

import time

import lightning.pytorch as lp
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from helpers.records import heard
from helpers.training import make_trainer
from lightning_gpp.runtime.run_state import ActionRecord

PAUSE_S = 0.1


class Pause(nn.Module):
    """Sleeps, so that even one core can be at work on both towers."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(PAUSE_S)
        return x * 1.0


class TwoTowers(lp.LightningModule):
    """Two slow towers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(2, 4), Pause(), nn.Linear(4, 4))
        self.right = nn.Sequential(nn.Linear(2, 4), Pause(), nn.Linear(4, 4))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([self.left(x), self.right(x)], 1))
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


PLAN = [["left"], ["right"], ["head"]]


def record_towers(num_microbatches: int, schedule: str) -> list[ActionRecord]:
    """Trains one step on three ranks; returns this rank's records."""
    strategy = {"num_microbatches": num_microbatches, "plan": PLAN, "schedule": schedule}
    trainer = make_trainer(strategy | {"leaf_modules": [Pause], "timeout": 100.0}, 3, max_steps=1)
    records: list[ActionRecord] = []
    with heard(records.append):
        trainer.fit(TwoTowers(), DataLoader(TensorDataset(torch.randn(16, 2)), batch_size=16))
    return records
