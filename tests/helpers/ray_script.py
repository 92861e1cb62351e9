"""Training by Ray Train, in which a worker dies once: ``ray_script.py FOLDER``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray
import ray.train
import torch
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset

from helpers.small_chain import SmallChain
from lightning_gpp import GraphPipeStrategy

NUM_EPOCHS = 4


class Dies(pl.Callback):
    """Ends a worker in the third epoch, once."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.current_epoch == 2 and trainer.global_rank == 1 and not self.flag.exists():
            self.flag.touch()
            os._exit(1)


def fit(checkpoint: Path | None = None, **options: Any) -> SmallChain:
    """A trained module."""
    pl.seed_everything(3)
    module = SmallChain().double()
    data = TensorDataset(torch.randn(80, 4).double(), torch.randn(80, 2).double())
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=NUM_EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(module, DataLoader(data, 8), ckpt_path=checkpoint)
    return module


def work(folder: str) -> None:
    """What every worker of Ray does."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {
        "devices": "auto",
        "strategy": GraphPipeStrategy(num_microbatches=4, timeout=60.0),
        "plugins": [RayLightningEnvironment()],
        "callbacks": [RayTrainReportCallback(), Dies(Path(folder) / "died")],
    }
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as path:
            module = fit(Path(path) / RayTrainReportCallback.CHECKPOINT_NAME, **options)
    else:
        module = fit(**options)
    if ray.train.get_context().get_world_rank() == 0:
        torch.save(module.state_dict(), Path(folder) / "weights.pt")


def main(folder: str) -> None:
    ray.init(num_cpus=3, include_dashboard=False)
    TorchTrainer(
        work,
        train_loop_config=folder,
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1])
