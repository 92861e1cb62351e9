"""The job ``eval``: the metrics of a checkpoint on the recipe's data."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from lightning_gpp.jobs.checkpoint import checkpoint_of
from lightning_gpp.jobs.train import as_numbers, build_run, has_test, report_run


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
