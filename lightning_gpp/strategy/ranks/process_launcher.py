"""Lightning's process launcher, with limits on all waits, and SIGTERM passed to the ranks.

Lightning's launchers hand back weights, ``callback_metrics`` and the path of the best checkpoint.
Here the starter's Trainer also knows how far training came and what it logged and kept, as after a
run that the script itself was a rank of.
"""

from __future__ import annotations

import io
import signal
import sys
from operator import attrgetter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_gpp.runtime.processes.rank_processes import end_with_starter, ended_after_error
from lightning_gpp.strategy.lightning_private import (
    MultiProcessingLauncher,
    SIGTERMException,
)
from lightning_gpp.strategy.ranks.failure import of_other_rank
from lightning_gpp.strategy.ranks.short_traceback import shorten
from lightning_gpp.strategy.report import show

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
"""Exit codes of a rank that was interrupted or asked to end, as shells have them."""


class ProcessLauncher(MultiProcessingLauncher):
    """Starts the ranks by ``spawn``, ``fork`` or ``forkserver``; none outlives the job."""

    _strategy: Any

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a function on all ranks and returns what it returns on rank 0."""
        if self._start_method != "fork":  # each imports torch and Lightning, for seconds
            show(f"Starting {self._strategy.num_processes} processes ...")
        with ended_after_error():
            return super().launch(*args, **kwargs)

    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """What rank 0 sends beside weights: how far training came, and the plan that was shown."""
        shown = self._strategy.reports.shown_plan
        own = {"handed_back": handed_back(trainer), "shown_plan": shown}
        return super().get_extra_results(trainer) | own

    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        """Takes it over in the starting process, from which the next loop's ranks are started."""
        super().update_main_process_results(trainer, extra)
        take_back(trainer, extra["handed_back"])
        self._strategy.reports.shown_plan = extra["shown_plan"]

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        """A rank. One that ends early must not end with 0: its starter would wait for a result.

        Raises:
            RuntimeError: user code ended the process as if all was well.
        """
        end_with_starter()
        try:
            super()._wrapping_function(*args, **kwargs)
        except KeyboardInterrupt as error:
            self._strategy.end_process(error)
            sys.exit(INTERRUPTED)
        except SIGTERMException:
            sys.exit(TERMINATED)
        except Exception as error:
            first = self._strategy.end_process(error) or error
            if isinstance(first, KeyboardInterrupt):
                sys.exit(INTERRUPTED)
            if of_other_rank(first) is not None:
                raise first.with_traceback(None) from None  # without the way that led to it here
            shorten(error)
            raise error
        except SystemExit as error:
            if error.code in (None, 0):
                raise RuntimeError(
                    "sys.exit() was called on this rank before the run had ended. To stop early, "
                    "set trainer.should_stop = True"
                ) from error
            raise


LOOP_STATE = "state_dict"
"""Last part of the keys under which a loop keeps what is no progress."""


def handed_back(trainer: pl.Trainer) -> bytes:
    """Steps and epochs done, logged metrics and kept checkpoints of a Trainer that has run."""
    state = trainer.fit_loop.state_dict()
    found = {
        "progress": {key: each for key, each in state.items() if not key.endswith(LOOP_STATE)},
        "epoch_loop": state[f"epoch_loop.{LOOP_STATE}"],
        "logged_metrics": dict(trainer.logged_metrics),
        "checkpoints": [
            ModelCheckpoint.state_dict(callback) for callback in _checkpoint_callbacks(trainer)
        ],
    }
    buffer = io.BytesIO()
    torch.save(pytree.tree_map_only(Tensor, Tensor.cpu, found), buffer)
    return buffer.getvalue()


def take_back(trainer: pl.Trainer, data: bytes) -> None:
    """Gives a Trainer what :func:`handed_back` made of the same one in another process."""
    found = torch.load(io.BytesIO(data), weights_only=False)
    for key, value in found["progress"].items():
        attrgetter(key)(trainer.fit_loop).load_state_dict(value)
    trainer.fit_loop.epoch_loop.on_load_checkpoint(found["epoch_loop"])
    trainer.logged_metrics.update(found["logged_metrics"])
    for callback, kept in zip(_checkpoint_callbacks(trainer), found["checkpoints"]):
        vars(callback).update(kept)


def _checkpoint_callbacks(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
