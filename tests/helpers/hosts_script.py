"""A user's script for hosts, as ``torchrun`` or SLURM start it on each.

Arguments: folder for the results, number of pipelines, and ``lost`` on a host that is to be lost in
the sixth step. Checkpoints are kept, and the script goes on from the last one.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from standin.switch import devices

from helpers.models import DataSpec, ExportableModel
from helpers.training import quiet
from lightning_gpp import GraphPipeStrategy

NUM_STEPS = 12

DATA = DataSpec(num_inputs=2, num_samples=32, batch_size=8)


class LostHost(lp.Callback):
    """A rank kills the agent that started it, and itself."""

    def on_train_batch_start(self, trainer: lp.Trainer, *_: Any) -> None:
        """Before the sixth step."""
        if trainer.global_step == 5 and trainer.local_rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, pipelines: int, is_lost: bool) -> None:
    """Trains a few steps on all ranks of all hosts; rank 0 saves the weights."""
    torch.set_num_threads(1)
    kept = ModelCheckpoint(folder / "kept", save_last=True, every_n_train_steps=4)
    with quiet():
        trainer = lp.Trainer(
            **devices(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
            num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "2")),  # as torchrun says
            strategy=GraphPipeStrategy(pipelines=pipelines, num_microbatches=2, timeout=250),
            max_steps=NUM_STEPS,
            max_epochs=-1,
            callbacks=[kept, *([LostHost()] if is_lost else [])],
            logger=False,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = ExportableModel().double()
        trainer.fit(module, DATA.loader(), ckpt_path="last")
    if trainer.global_rank == 0:
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        torch.save({"weights": weights, "num_ranks": trainer.world_size}, folder / "trained.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), "lost" in sys.argv)
