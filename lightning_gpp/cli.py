"""The console command ``graphpipe``: a thin Hydra application.

It runs the job that the configuration group ``job`` names (:mod:`lightning_gpp.jobs`), and leaves
in the Hydra run folder ``config.yaml`` (the resolved configuration) and what the job writes.

In a sweep (``-m``) every job has a folder of its own;
:mod:`lightning_gpp.jobs.sweep` makes the report.

Torch and Lightning are imported when a job needs them, so that ``graphpipe --help``, a mistyped
override and a plan of a published workload answer at once.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, HydraException
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf

from lightning_gpp.jobs.job_scope import is_sweep, job_scope

TAKES_ANY = ("graph_options", "hydra")
"""Options that are checked where they are read."""

BROKEN_PIPE = 141
"""What shells take for "ended as nobody read its output"."""


class RunError(CompactHydraException):
    """A run that failed; Hydra prints the text alone unless HYDRA_FULL_ERROR=1 is set."""


def main() -> None:
    """The command; it ends quietly where its output is not read to the end (``| head``)."""
    sys.argv[1:] = map(with_quoted_path, sys.argv[1:])
    for name, plugin in (("optuna", "hydra_optuna_sweeper"), ("joblib", "hydra_joblib_launcher")):
        is_asked = any(argument.endswith(f"={name}") for argument in sys.argv)
        if is_asked and not find_spec(f"hydra_plugins.{plugin}"):
            sys.exit(f"{name} is not installed: pip install '.[sweep]'")
    try:
        hydra_main()
        sys.stdout.flush()
    except HydraException as refused:  # of --help and --cfg, which Hydra lets through
        if "HYDRA_FULL_ERROR" in os.environ:
            raise
        sys.exit(str(refused))
    except BrokenPipeError:
        raise _nobody_reads() from None


@hydra.main(version_base="1.3", config_path="pkg://lightning_gpp.configs", config_name="config")
def hydra_main(config: DictConfig) -> float | None:
    """Runs one job; a failure ends in one message.

    Returns:
        The metric that the configuration's ``objective`` names, for sweepers that search.
    """
    try:
        check_added(config, HydraConfig.get().overrides.task)
        with job_scope(HydraConfig.get().runtime.cwd):
            return run_job(config, Path(config.paths.output_dir))
    except BrokenPipeError:
        raise _nobody_reads() from None
    except Exception as error:
        raise RunError(first_error(error)) from error


def with_quoted_path(argument: str) -> str:
    """A checkpoint's path in the quotes that Hydra asks for, as Lightning's names have ``=``.

    >>> with_quoted_path("ckpt_path=run/epoch=9-step=50.ckpt")
    "ckpt_path='run/epoch=9-step=50.ckpt'"
    >>> with_quoted_path("ckpt_path=last.ckpt"), with_quoted_path("seed=1")
    ('ckpt_path=last.ckpt', 'seed=1')
    """
    name, _, path = argument.partition("=")
    if name != "ckpt_path" or "=" not in path or path[0] in "'\"" or "\\" in path:
        return argument
    return f"{name}='{path}'"


def _nobody_reads() -> SystemExit:
    """The end of a command whose output is closed.

    Python flushes once more at its end, which would print the error after all.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return SystemExit(BROKEN_PIPE)


def run_job(config: DictConfig, folder: Path) -> float | None:
    """Runs the job of a configuration, which leaves its files in the run's folder.

    Returns:
        The metric of the configuration's ``objective``, None without one.
    """
    if is_sweep():
        check_objective(config.objective, HydraConfig.get().sweeper._target_)
    check_complete(config)
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "config.yaml", resolve=True)  # needs no environment variable
    job: Callable[[DictConfig, Path], dict[str, float]] = get_method(config.job._target_)
    return objective_value(config.objective, job(config, folder))


def check_added(config: DictConfig, overrides: Sequence[str]) -> None:
    """Refuses ``+name=value`` where nothing reads it: what is called does, and who refers to it.

    Raises:
        ValueError: the text names the option.
    """
    written = OmegaConf.to_yaml(config, resolve=False)
    for name in (text.lstrip("+").partition("=")[0] for text in overrides if text[0] == "+"):
        parts = name.split(".")
        above = [OmegaConf.select(config, ".".join(parts[:end])) for end in range(1, len(parts))]
        is_read = parts[0] != "job" and any(
            "_target_" in each for each in above if isinstance(each, DictConfig)
        )
        is_group = "@" in name or "/" in name or name in HydraConfig.get().runtime.choices
        if not (is_read or is_group or parts[0] in TAKES_ANY or f"${{{name}" in written):
            raise ValueError(
                f"+{name} adds an option that nothing reads; without the + mistyped names are "
                "refused, and --cfg job lists the known ones"
            )


def check_complete(config: DictConfig) -> None:
    """Refuses options that have to be given and are not.

    Raises:
        ValueError: the text names them.
    """
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise ValueError(f"{' and '.join(f'{name}=VALUE' for name in missing)} has to be given")


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


def first_error(error: Exception) -> str:
    """The original error in one message, without Hydra's wrapping or the traceback of a process.

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
