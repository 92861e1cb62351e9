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
        How many batches there were.

    Raises:
        ValueError: no checkpoint is named.
        FileNotFoundError: it is not there.
    """
    import torch

    path = checkpoint_of(config)
    trainer, module, data = build_run(config)
    predictions = trainer.predict(module, datamodule=data, ckpt_path=path) or []
    metrics = {"num_batches": float(len(predictions))}
    if is_first_rank():
        torch.save(predictions, folder / PREDICTIONS)
    report_run(metrics, folder)
    return metrics
