"""A user's script for hosts, as ``torchrun`` or SLURM start it on each.

Arguments: folder for the results, number of pipelines, and whether rank 1 is killed in the middle
of the first start. It goes on from its last checkpoint, where there is one.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

import lightning.pytorch as lp
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from helpers.models import DataSpec, ExportableModel
from helpers.training import quiet
from lightning_gpp import GraphPipeStrategy

NUM_STEPS = 12
KILLED_AT = 9
"""Batches of the script; a checkpoint is kept every four."""

DATA = DataSpec(num_inputs=2, num_samples=32, batch_size=8)


class KillOnFirstStart(lp.Callback):
    """Kills rank 1 in the middle of training, once."""

    def on_train_batch_start(self, trainer: lp.Trainer, *args: object) -> None:
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if is_first and trainer.global_rank == 1 and trainer.global_step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, pipelines: int, is_killed: bool) -> None:
    """Trains a few steps on all ranks of all hosts; rank 0 saves the weights."""
    torch.set_num_threads(1)
    kept = ModelCheckpoint(folder / "kept", save_last=True, every_n_train_steps=4)
    starts: list[int] = []
    with quiet():
        warnings.filterwarnings("ignore", message=".*no last checkpoint available")
        trainer = lp.Trainer(
            accelerator="cpu",
            num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "2")),  # as torchrun says
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            strategy=GraphPipeStrategy(pipelines=pipelines, num_microbatches=2, timeout=60),
            max_steps=NUM_STEPS,
            max_epochs=-1,
            callbacks=[kept, _NoteStart(starts), *([KillOnFirstStart()] if is_killed else [])],
            logger=False,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = ExportableModel().double()
        trainer.fit(module, DATA.loader(), ckpt_path="last")
    if trainer.global_rank == 0:
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        torch.save({"weights": weights, "began_at": starts[0]}, folder / "trained.pt")


class _NoteStart(lp.Callback):
    def __init__(self, starts: list[int]) -> None:
        self._starts = starts

    def on_train_start(self, trainer: lp.Trainer, pl_module: lp.LightningModule) -> None:
        self._starts.append(trainer.global_step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "killed")
