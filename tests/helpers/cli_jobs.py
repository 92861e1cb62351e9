"""A user's ``LightningCLI``, as a rank of a pipeline."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as lp
from torch.utils.data import DataLoader

from helpers.models import DataSpec, ExportableModel
from helpers.training import quiet, real_tensors


class CLIModule(ExportableModel):
    """Float64 by itself: a command line cannot call ``double()``."""

    def __init__(self) -> None:
        super().__init__()
        self.double()


class CLIData(lp.LightningDataModule):
    """The data that all models of the tests are trained on."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataSpec(num_inputs=2, batch_size=self.batch_size).loader()


def fit_by_cli(arguments: list[str], folder: str) -> dict[str, Any]:
    """Trains as ``python script.py fit …`` would.

    Args:
        arguments: behind the name of the script.
        folder: of the run.
    """
    from lightning.pytorch.cli import LightningCLI

    options = ["max_steps=6", "logger=false", "enable_checkpointing=false", "accelerator=cpu"]
    options += ["enable_progress_bar=false", "enable_model_summary=false"]
    given = [f"--trainer.{option}" for option in [*options, f"default_root_dir={folder}"]]
    with quiet():
        cli = LightningCLI(
            CLIModule, CLIData, seed_everything_default=0, args=["fit", *given, *arguments]
        )
    return {"weights": real_tensors(cli.model), "global_step": cli.trainer.global_step}
