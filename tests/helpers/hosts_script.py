"""A user's script for hosts, as ``torchrun`` or SLURM start it on each.

Arguments: folder for the results and number of pipelines.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lightning.pytorch as lp
import torch

from helpers.models import DataSpec, ExportableModel
from helpers.training import quiet
from lightning_gpp import GraphPipeStrategy

NUM_STEPS = 12

DATA = DataSpec(num_inputs=2, num_samples=32, batch_size=8)


def main(folder: Path, pipelines: int) -> None:
    """Trains a few steps on all ranks of all hosts; rank 0 saves the weights."""
    torch.set_num_threads(1)
    with quiet():
        trainer = lp.Trainer(
            accelerator="cpu",
            num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "2")),  # as torchrun says
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            strategy=GraphPipeStrategy(pipelines=pipelines, num_microbatches=2, timeout=60),
            max_steps=NUM_STEPS,
            max_epochs=-1,
            enable_checkpointing=False,
            logger=False,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = ExportableModel().double()
        trainer.fit(module, DATA.loader())
    if trainer.global_rank == 0:
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        torch.save({"weights": weights}, folder / "trained.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
