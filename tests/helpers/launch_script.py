"""A user's script: trains with a strategy given by name and lets Lightning start the ranks.

Arguments: name of the strategy, folder for the results, and a fault: ``none``; ``raise`` or
``kill``, which strike rank 1; ``leave``, by which all ranks end without a result; ``forever``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lightning.pytorch as lp
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from standin.switch import devices

import lightning_gpp  # noqa: F401  (registers the strategies)
from helpers.faults import FailOnRank
from helpers.models import DataSpec, ExportableModel
from helpers.training import quiet

NUM_RANKS = 2
NUM_STEPS = 6


class WritePid(lp.Callback):
    """Leaves the process ids of all ranks in the folder, again when they have trained a batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_start(self, trainer: lp.Trainer, pl_module: lp.LightningModule) -> None:
        self._write(trainer, "pid")

    def on_train_batch_end(self, trainer: lp.Trainer, *args: object) -> None:
        self._write(trainer, "trained")

    def _write(self, trainer: lp.Trainer, suffix: str) -> None:
        (self.folder / f"rank_{trainer.global_rank}.{suffix}").write_text(str(os.getpid()))


class Leave(lp.Callback):
    """Ends every rank as if all was well."""

    def on_train_batch_start(self, *args: object) -> None:
        sys.exit()


def main(strategy: str, folder: Path, fault: str) -> None:
    """Trains a few steps; the script's own process saves what it then knows of the training."""
    torch.set_num_threads(1)
    callbacks: list[lp.Callback] = [WritePid(folder)]
    if fault == "leave":
        callbacks.append(Leave())
    elif fault in ("raise", "kill"):
        callbacks.append(FailOnRank(1, fault))
    kept = ModelCheckpoint(monitor="val_loss")
    callbacks.append(kept)
    with quiet():
        trainer = lp.Trainer(
            **({"accelerator": "cpu", "devices": 1} if strategy == "auto" else devices(NUM_RANKS)),
            strategy=strategy,
            max_steps=-1 if fault == "forever" else NUM_STEPS,
            max_epochs=-1,
            callbacks=callbacks,
            logger=False,
            log_every_n_steps=1,
            default_root_dir=folder / strategy,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = ExportableModel().double()
        data = DataSpec(num_inputs=2)
        trainer.fit(module, data.loader(), data.loader())
    if trainer.global_rank == 0:
        torch.save(
            {
                "weights": {name: value.clone() for name, value in module.state_dict().items()},
                "val_loss": torch.as_tensor(trainer.callback_metrics["val_loss"]),
                "logged": trainer.logged_metrics,
                "best_score": kept.best_model_score,
                "progress": (trainer.global_step, trainer.current_epoch),
            },
            folder / f"{strategy}.pt",
        )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
