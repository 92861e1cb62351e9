"""The console command ``graphpipe``: a thin Hydra application.

It puts a recipe's data and module, a strategy and a Trainer together, trains, and leaves in the
Hydra run folder ``metrics.json``, ``plan.json``, ``config.yaml`` (the resolved configuration), and
``timeline.png`` and ``trace.json`` of one early step.

In a sweep (``-m``) every job has a folder of its own; :mod:`lightning_gpp.sweep` makes the report.

Torch and Lightning are imported when the run starts, so that ``graphpipe --help`` and a mistyped
override answer at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_gpp.job_scope import job_scope, refuse_script_launcher

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import Strategy


class RunError(CompactHydraException):
    """A run that failed; Hydra prints the text alone unless HYDRA_FULL_ERROR=1 is set."""


@hydra.main(version_base="1.3", config_path="pkg://lightning_gpp.configs", config_name="config")
def main(config: DictConfig) -> float | None:
    """Runs one job; a failure ends in one message.

    Returns:
        The metric that the configuration's ``objective`` names, for sweepers that search.
    """
    try:
        with job_scope(HydraConfig.get().runtime.cwd):
            return run_job(config, Path(config.output_dir))
    except Exception as error:
        raise RunError(first_error(error)) from error


def run_job(config: DictConfig, folder: Path) -> float | None:
    """Trains and leaves the files of the run in its folder.

    Returns:
        The metric of the configuration's ``objective``, None without one.
    """
    if is_sweep():
        check_objective(config.objective, HydraConfig.get().sweeper._target_)
    save_config(config, folder)
    metrics = train(config)
    if is_first_rank():
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
        print(describe_run(metrics, folder))
    return objective_value(config.objective, metrics)


def train(config: DictConfig) -> dict[str, float]:
    """Trains as the configuration says.

    Returns:
        The final metrics by name.
    """
    from lightning.pytorch import seed_everything

    callbacks = [instantiate(callback) for callback in config.callbacks.values() if callback]
    seed_everything(config.seed, workers=True, verbose=False)
    data = instantiate(config.data)
    # A recipe builds its module for the data; a module that needs none says takes_data: false.
    arguments = [data] if config.recipe.get("takes_data", True) else []
    module = instantiate(config.recipe.module, *arguments)
    trainer: Trainer = instantiate(
        config.trainer,
        strategy=build_strategy(config.strategy),
        callbacks=callbacks,
    )
    if is_sweep():
        refuse_script_launcher(trainer)
    trainer.fit(module, datamodule=data)
    return {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}


def is_sweep() -> bool:
    """Whether Hydra runs this as a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def is_first_rank() -> bool:
    """Whether this process is rank 0; false in the processes of ``start_method=popen``."""
    from lightning.pytorch.utilities import rank_zero_only

    return int(getattr(rank_zero_only, "rank", 0)) == 0


def check_objective(objective: str | None, sweeper: str) -> None:
    """Refuses a search that has nothing to look at, before it trains.

    Raises:
        ValueError: the sweeper searches and no objective is named.
    """
    if objective is None and not sweeper.endswith(".BasicSweeper"):
        raise ValueError(
            f"{sweeper.rpartition('.')[2]} needs a metric to look at: "
            "set objective=<name of a final metric>, such as objective=val_loss"
        )


def objective_value(objective: str | None, metrics: Mapping[str, float]) -> float | None:
    """The final metric of a name.

    Raises:
        ValueError: there is no such metric; the text lists those that there are.

    >>> objective_value("val_loss", {"val_loss": 0.5})
    0.5
    """
    if objective is None:
        return None
    if objective not in metrics:
        raise ValueError(f"objective={objective} is no final metric of this run: {[*metrics]}")
    return metrics[objective]


def build_strategy(config: DictConfig | str) -> Strategy | str:
    """The strategy of a configuration, or a name that Lightning knows."""
    if isinstance(config, str):
        return config
    strategy: Strategy = instantiate(config, _convert_="all")
    return strategy


def save_config(config: DictConfig, folder: Path) -> None:
    """Writes the resolved configuration, which needs no environment variable to be read again."""
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "config.yaml", resolve=True)


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
    names = ("metrics.json", "plan.json", "timeline.png", "trace.json", "config.yaml")
    files = [name for name in names if name == "config.yaml" or (folder / name).exists()]
    return "\n".join(["", "final metrics", *rows, f"written to {folder}: {', '.join(files)}"])


def first_error(error: Exception) -> str:
    """What went wrong, in one message: without the traceback of a process and Hydra's wrapping.

    >>> first_error(ValueError("batch_size must be at least 1, got 0"))
    'ValueError: batch_size must be at least 1, got 0'
    """
    cause: BaseException = error
    if isinstance(error, CompactHydraException) and error.__cause__ is not None:
        cause = error.__cause__
    text = str(cause)
    if "Traceback (most recent call last):" in text:
        return _after_traceback(text)
    return f"{type(cause).__name__}: {text}"


def _after_traceback(text: str) -> str:
    r"""The exception at the end of a printed traceback.

    >>> trace = 'Traceback (most recent call last):\n  File "a.py", line 1\n    f()\nValueError: no'
    >>> _after_traceback(trace)
    'ValueError: no'
    """
    last_frame = text.rfind('\n  File "')
    match = re.search(r"^[A-Za-z_][\w.]*(: |$)", text[last_frame + 1 :], flags=re.MULTILINE)
    return text[last_frame + 1 + match.start() :].strip() if match else text.strip()


if __name__ == "__main__":
    main()
