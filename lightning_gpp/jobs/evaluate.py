"""The jobs ``eval`` and ``predict``: what a checkpoint does on the recipe's data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import DictConfig

from lightning_gpp.jobs.files import PREDICTIONS
from lightning_gpp.jobs.train import as_numbers, build_run, has_test, is_first_rank, report_run
from lightning_gpp.strategy.state.sharded_checkpoint import is_sharded


def run(config: DictConfig, folder: Path) -> dict[str, float]:
    """Tests the checkpoint; validates it where module and data have no test.

    Returns:
        The metrics by name.

    Raises:
        ValueError: no checkpoint is named.
        FileNotFoundError: it is not there.
    """
    path = checkpoint_of(config)
    trainer, module, data = build_run(config)
    evaluate = trainer.test if has_test(module, data) else trainer.validate
    evaluate(module, datamodule=data, ckpt_path=path, verbose=False)
    metrics = as_numbers(trainer.callback_metrics)
    report_run(metrics, folder)
    return metrics


def predict(config: DictConfig, folder: Path) -> dict[str, float]:
    """Writes a list with what ``predict_step`` returns for every batch of ``predict_dataloader``.

    Returns:
        How many batches there were; nothing on other ranks than the first.

    Raises:
        ValueError: no checkpoint is named, or several ranks read a part of the data each.
        FileNotFoundError: it is not there.
    """
    path, written = checkpoint_of(config), folder / PREDICTIONS
    trainer, module, data = build_run(config, [PredictionsFile(written)])
    # Processes that Lightning starts return no predictions: the first rank writes them.
    trainer.predict(module, datamodule=data, ckpt_path=path, return_predictions=False)
    if not is_first_rank():
        return {}
    metrics = {"num_batches": float(len(torch.load(written, weights_only=False)))}
    report_run(metrics, folder)
    return metrics


def checkpoint_of(config: DictConfig) -> str:
    """The file, or the folder of a sharded checkpoint, that ``ckpt_path`` names."""
    path = config.ckpt_path
    if path is None:
        raise ValueError(
            "ckpt_path=FILE has to be given: the checkpoint to load; a training run leaves one in "
            "lightning/checkpoints of its folder"
        )
    if not (Path(path).is_file() or is_sharded(path)):
        raise FileNotFoundError(f"ckpt_path={path} is no file and no sharded checkpoint")
    return str(path)


class PredictionsFile(Callback):
    """The first rank writes a list with what ``predict_step`` returned, batch by batch.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._predictions: list[Any] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses data of which the first rank predicts a part.

        Raises:
            ValueError: the text says what to choose.
        """
        readers = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        if readers > 1:
            raise ValueError(
                f"{readers} ranks would each predict a part of the data, but only the first one "
                "writes its predictions; choose strategy.pipelines=1, or strategy=single_device"
            )

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Keeps what a batch gave."""
        if trainer.is_global_zero:
            self._predictions.append(move_data_to_device(outputs, torch.device("cpu")))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the file."""
        if trainer.is_global_zero:
            torch.save(self._predictions, self._path)
