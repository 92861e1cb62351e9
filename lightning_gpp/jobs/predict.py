"""The job ``predict``: what a checkpoint predicts, in a file."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from lightning_gpp.jobs.checkpoint import checkpoint_of
from lightning_gpp.jobs.files import PREDICTIONS
from lightning_gpp.jobs.train import build_run, is_first_rank, report_run


def run(config: DictConfig, folder: Path) -> dict[str, float]:
    """Writes a list with what ``predict_step`` returns for every batch of ``predict_dataloader``.

    Returns:
        How many batches there were; nothing on other ranks than the first.

    Raises:
        ValueError: no checkpoint is named, or several ranks read a part of the data each.
        FileNotFoundError: it is not there.
    """
    import torch

    from lightning_gpp.jobs.predictions_file import PredictionsFile

    path, written = checkpoint_of(config), folder / PREDICTIONS
    trainer, module, data = build_run(config, [PredictionsFile(written)])
    # Processes that Lightning starts return no predictions: the first rank writes them.
    trainer.predict(module, datamodule=data, ckpt_path=path, return_predictions=False)
    if not is_first_rank():
        return {}
    metrics = {"num_batches": float(len(torch.load(written, weights_only=False)))}
    report_run(metrics, folder)
    return metrics
