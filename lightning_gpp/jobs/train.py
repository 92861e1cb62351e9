"""The jobs ``train`` and ``eval``: build data, module, strategy and Trainer, and run them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_gpp.jobs.files import save_metrics, written_to
from lightning_gpp.jobs.job_scope import is_sweep, refuse_script_launcher

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy


def run(config: DictConfig, folder: Path) -> dict[str, float]:
    """Trains; the first rank writes and shows the final metrics.

    Returns:
        The final metrics by name.
    """
    metrics = train(config)
    report_run(metrics, folder)
    return metrics


def train(config: DictConfig) -> dict[str, float]:
    """The final metrics of training as the configuration says, and of a test where there is one."""
    trainer, module, data = build_run(config)
    trainer.fit(module, datamodule=data, ckpt_path=config.ckpt_path)
    metrics = dict(trainer.callback_metrics)
    if config.test and has_test(module, data):
        keep_logged_tables(trainer)
        trainer.test(module, datamodule=data, ckpt_path=best_checkpoint(trainer))
        metrics |= trainer.callback_metrics
    return as_numbers(metrics)


def evaluate(config: DictConfig, folder: Path) -> dict[str, float]:
    """Tests the checkpoint; validates it where module and data have no test.

    Returns:
        The metrics by name.

    Raises:
        ValueError: no checkpoint is named.
        FileNotFoundError: it is not there.
    """
    path = checkpoint_of(config)
    trainer, module, data = build_run(config)
    runs = trainer.test if has_test(module, data) else trainer.validate
    runs(module, datamodule=data, ckpt_path=path, verbose=False)
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
    from lightning_gpp.strategy.state.sharded_checkpoint import is_sharded

    if not (Path(path).is_file() or is_sharded(path)):
        raise FileNotFoundError(f"ckpt_path={path} is no file and no sharded checkpoint")
    return str(path)


def build_run(config: DictConfig) -> tuple[Trainer, LightningModule, LightningDataModule]:
    """The Trainer, the module and the data of a configuration.

    Raises:
        ValueError: the processes would run a sweep again, or the data need a folder.
    """
    module, data = build_recipe(config)
    trainer: Trainer = instantiate(
        config.trainer,
        strategy=build_strategy(config.strategy),
        logger=instances(config.get("logger")) or False,
        callbacks=instances(config.get("callbacks")),
    )
    if is_sweep():
        refuse_script_launcher(trainer)
    return trainer, module, data


def instances(group: DictConfig | None) -> list[Any]:
    """Instantiates the entries of a configuration group; null entries are left out."""
    return [instantiate(entry) for entry in (group or {}).values() if entry]


def keep_logged_tables(trainer: Trainer) -> None:
    """Takes away loggers of tables, where new processes would begin them again."""
    from lightning.pytorch.loggers import CSVLogger

    from lightning_gpp.strategy.lightning_private import MultiProcessingLauncher

    if isinstance(trainer.strategy.launcher, MultiProcessingLauncher):
        kept = [logger for logger in trainer.loggers if not isinstance(logger, CSVLogger)]
        trainer.loggers = kept


def has_test(module: LightningModule, data: LightningDataModule) -> bool:
    """Whether there is something to test, and a way to."""
    from lightning_gpp.strategy.lightning_private import is_overridden

    return is_overridden("test_step", module) and is_overridden("test_dataloader", data)


def best_checkpoint(trainer: Trainer) -> str | None:
    """The checkpoint that a metric has chosen as the best; None: the weights as they are."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    found = [
        callback.best_model_path
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint) and callback.monitor
    ]
    return next(filter(None, found), None)


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics by name, sorted."""
    return {name: float(value) for name, value in sorted(metrics.items())}


def build_recipe(config: DictConfig) -> tuple[LightningModule, LightningDataModule]:
    """The module and the data of a configuration, from its seed.

    Raises:
        ValueError: the data need a folder that was not named.
    """
    from lightning.pytorch import seed_everything

    check_data_folder(config)
    seed_everything(config.seed, workers=True, verbose=False)
    data = instantiate(config.data)
    # A recipe builds its module for the data; a module that needs none says takes_data: false.
    arguments = [data] if config.recipe.get("takes_data", True) else []
    return instantiate(config.recipe.module, *arguments), data


DATA_DIR = "${paths.data_dir}"


def check_data_folder(config: DictConfig) -> None:
    """Refuses data that are read from a folder where none is named.

    Raises:
        ValueError: the text says how to name it.
    """
    root = OmegaConf.to_container(config.data, resolve=False).get("root")  # type: ignore[union-attr]
    if not isinstance(root, str) or config.paths.data_dir is not None:
        return
    if root.startswith(DATA_DIR):
        raise ValueError(
            f"{config.data._target_} reads files below FOLDER{root.removeprefix(DATA_DIR)} (which: "
            "docs/full_graph.md and docs/command_line.md): name FOLDER by paths.data_dir=FOLDER or "
            "the environment variable LIGHTNING_GPP_DATA"
        )


def build_strategy(config: DictConfig | str) -> Strategy | str:
    """The strategy of a configuration, or a name that Lightning knows."""
    if isinstance(config, str):
        return config
    strategy: Strategy = instantiate(config, _convert_="all")
    return strategy


def report_run(metrics: Mapping[str, float], folder: Path) -> None:
    """Writes and shows the metrics of a run, on its first rank."""
    from lightning.pytorch.utilities import rank_zero_only

    if int(getattr(rank_zero_only, "rank", 0)) == 0:  # of `start_method=popen`, too
        save_metrics(metrics, folder)
        print(describe_run(metrics, folder))


def describe_run(metrics: Mapping[str, float], folder: Path) -> str:
    """The final metrics as a table, and where the files are.

    >>> print(describe_run({"train_loss": 0.25, "val_acc": 0.9875}, Path("run")))
    <BLANKLINE>
    final metrics
      train_loss  0.25
      val_acc     0.9875
    written to run
    """
    width = max(map(len, metrics), default=0)
    rows = [f"  {name:<{width}}  {value:.4g}" for name, value in metrics.items()]
    return "\n".join(["", "final metrics", *rows, written_to(folder)])
