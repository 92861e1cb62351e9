"""The job ``train``: a recipe's data and module, a strategy and a Trainer, put together and run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_gpp.job_scope import is_sweep, refuse_script_launcher
from lightning_gpp.jobs.files import save_metrics, written_to

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy


def run(config: DictConfig, folder: Path) -> dict[str, float]:
    """Trains; the first rank writes and shows the final metrics.

    Returns:
        The final metrics by name.
    """
    metrics = train(config)
    if is_first_rank():
        save_metrics(metrics, folder)
        print(describe_run(metrics, folder))
    return metrics


def train(config: DictConfig, watching: Sequence[Callback] = ()) -> dict[str, float]:
    """Trains as the configuration says.

    Args:
        config: of the run.
        watching: callbacks beside its own.

    Returns:
        The final metrics by name.
    """
    callbacks = [instantiate(callback) for callback in config.callbacks.values() if callback]
    callbacks += watching
    module, data = build_recipe(config)
    trainer: Trainer = instantiate(
        config.trainer,
        strategy=build_strategy(config.strategy),
        callbacks=callbacks,
    )
    if is_sweep():
        refuse_script_launcher(trainer)
    trainer.fit(module, datamodule=data)
    return {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}


def build_recipe(config: DictConfig) -> tuple[LightningModule, LightningDataModule]:
    """The module and the data of a configuration, from its seed."""
    from lightning.pytorch import seed_everything

    seed_everything(config.seed, workers=True, verbose=False)
    data = instantiate(config.data)
    # A recipe builds its module for the data; a module that needs none says takes_data: false.
    arguments = [data] if config.recipe.get("takes_data", True) else []
    return instantiate(config.recipe.module, *arguments), data


def build_strategy(config: DictConfig | str) -> Strategy | str:
    """The strategy of a configuration, or a name that Lightning knows."""
    if isinstance(config, str):
        return config
    strategy: Strategy = instantiate(config, _convert_="all")
    return strategy


def is_first_rank() -> bool:
    """Whether this process is rank 0; false in the processes of ``start_method=popen``."""
    from lightning.pytorch.utilities import rank_zero_only

    return int(getattr(rank_zero_only, "rank", 0)) == 0


def describe_run(metrics: Mapping[str, float], folder: Path) -> str:
    """The final metrics as a table, and where the files are.

    >>> print(describe_run({"train_loss": 0.25, "val_acc": 0.9875}, Path("run")))
    <BLANKLINE>
    final metrics
      train_loss  0.25
      val_acc     0.9875
    written to run: config.yaml
    """
    width = max(map(len, metrics), default=0)
    rows = [f"  {name:<{width}}  {value:.4g}" for name, value in metrics.items()]
    return "\n".join(["", "final metrics", *rows, written_to(folder)])
