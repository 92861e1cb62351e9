"""One task of a SLURM job that a scheduler interrupts and puts back in the queue."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from standin.switch import devices
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from helpers.small_chain import SmallChain
from lightning_gpp import GraphPipeStrategy


class Model(SmallChain):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        time.sleep(0.05)
        return super().training_step(batch, index)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step == 5:
            Path("began").touch()


class Resumable(DataLoader[Any]):
    """Goes on in the midst of an epoch, as ``torchdata.StatefulDataLoader`` does."""

    num_read = 0

    def __iter__(self) -> Iterator[Any]:
        skipped = self.num_read % len(self)
        for number, batch in enumerate(super().__iter__(), 1):
            if number > skipped:
                self.num_read = number
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"num_read": self.num_read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_read = state["num_read"]


def main(checkpoint: str | None, weights: str) -> None:
    torch.set_num_threads(1)
    pl.seed_everything(3)
    module = Model().double()
    data = TensorDataset(torch.randn(320, 4).double(), torch.randn(320, 2).double())
    trainer = pl.Trainer(
        **devices(2),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=os.getcwd(),
        strategy=GraphPipeStrategy(num_microbatches=4, timeout=60.0),
        plugins=[SLURMEnvironment(auto_requeue=True)],
    )
    trainer.fit(module, Resumable(data, 8), ckpt_path=checkpoint)
    if trainer.is_global_zero:
        torch.save(module.state_dict(), weights)


if __name__ == "__main__":
    main(sys.argv[1] or None, sys.argv[2])
