"""The job ``eval``: what a checkpoint does on the recipe's data."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from lightning_gpp.jobs.train import as_numbers, build_run, has_test, report_run
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
