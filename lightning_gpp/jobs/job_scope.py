"""Keeps the jobs of a sweep apart, and sets how their processes may start.

Hydra runs the jobs of a sweep one after another in one process, or several side by side in worker
processes of a launcher plug-in. Lightning writes the port and the seed of a run into the
environment, where the next run would find and keep them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def is_sweep() -> bool:
    """Whether Hydra runs this as a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


@contextlib.contextmanager
def job_scope(folder: str) -> Iterator[None]:
    """Gives a job the environment as it was, and takes back what the job changes in it.

    A spawned process takes over the start method of its parent's by name; ``loky``, that of a
    worker of joblib, which no fresh Python process knows, would end it at once: it is ``spawn``
    here.

    Args:
        folder: where the command was given; modules of the user's in it can be imported, after
            all that is installed.
    """
    environment, path = dict(os.environ), list(sys.path)
    method = multiprocessing.get_start_method(allow_none=True)
    is_of_joblib = method in ("loky", "loky_init_main")
    if is_of_joblib:
        multiprocessing.set_start_method("spawn", force=True)
    if folder not in path:
        sys.path.append(folder)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        if is_of_joblib:
            multiprocessing.set_start_method(method, force=True)


def refuse_script_launcher(trainer: Trainer) -> None:
    """Refuses processes that would run the command line, a whole sweep, again.

    Raises:
        ValueError: the strategy's processes start as the command line does.
    """
    from lightning_gpp.strategy.lightning_private import SubprocessScriptLauncher

    launcher = trainer.strategy.launcher
    if not isinstance(launcher, SubprocessScriptLauncher):
        return
    if not launcher.cluster_environment.creates_processes_externally:
        raise ValueError(
            f"in a sweep, {type(trainer.strategy).__name__} cannot start its processes by running "
            "the command line again: each of them would run the whole sweep. Set "
            "strategy.start_method to spawn (as the recipes do), fork or forkserver"
        )
