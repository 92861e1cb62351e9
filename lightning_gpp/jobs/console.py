"""Filters what a ``graphpipe`` run prints. Only the command line uses it."""

from __future__ import annotations

import logging
import warnings

from lightning.pytorch import Callback

UNDERSTOOD_WARNINGS = (
    # Recipes keep their data in memory; processes that load them would only cost time.
    r"The '\w+' does not have many workers",
    # Lightning 2.6 with torch 2.13; nothing that the person at the console can change.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # job=eval needs no state of callbacks.
    r"Be aware that when using `ckpt_path`, callbacks used to create the checkpoint",
    # Every run has a folder of its own, so one that goes on keeps its checkpoints elsewhere.
    r"The dirpath has changed from",
)
"""Regular expressions for the beginnings of warnings that say nothing about the run."""

SKIPPED_MESSAGES = (
    # Advertisements of further packages.
    "💡 Tip: For seamless",
    # One line per process; "All distributed processes registered" follows.
    "Initializing distributed: GLOBAL_RANK",
    # It would tear the progress bar, which shows the same.
    "`Trainer.fit` stopped: `max_epochs=",
)
"""Beginnings of Lightning's messages that are left out."""


FILTERED_LOGGERS = (
    "lightning.fabric.utilities.distributed",
    "lightning.fabric.utilities.rank_zero",
    "lightning.pytorch.utilities.rank_zero",
)


class QuietConsole(Callback):
    """Keeps those of Lightning's messages that say something about the run, once each.

    It is a callback so that it travels with the Trainer: unpickling calls the constructor again,
    in every process that Lightning spawns.
    """

    def __init__(self) -> None:
        for message in UNDERSTOOD_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        for name in FILTERED_LOGGERS:
            logger = logging.getLogger(name)
            if tells_something not in logger.filters:
                logger.addFilter(tells_something)
        if logging.getLogger().hasHandlers():
            # Hydra has given the root logger a console and a file; Lightning's own repeats them.
            logging.getLogger("lightning").handlers.clear()
        # How the other processes are ended after the first error: the error itself is shown.
        logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)

    def __reduce__(self) -> tuple[type[QuietConsole], tuple[()]]:
        return QuietConsole, ()


def tells_something(record: logging.LogRecord) -> bool:
    """Whether a message of Lightning is shown."""
    return not record.getMessage().startswith(SKIPPED_MESSAGES)
