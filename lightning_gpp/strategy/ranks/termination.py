"""SIGTERM to any rank, as schedulers and ``kill`` send it: all ranks end after the step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import lightning.pytorch as pl

from lightning_gpp.strategy.lightning_private import answer_sigterm, receive_sigterm
from lightning_gpp.strategy.pipelined_run import PipelinedRun

log = logging.getLogger(__name__)


@contextlib.contextmanager
def ended_together(trainer: pl.Trainer, run: PipelinedRun) -> Iterator[None]:
    """In this SIGTERM ends a run on all ranks at the same place, where Lightning ends it on one."""

    def end(rank: int) -> None:
        if run.control.is_leader:
            log.warning("rank %d was asked to end (SIGTERM): all ranks end after this step", rank)
        receive_sigterm(trainer)

    run.on_terminated = end
    answer_sigterm(trainer, run.failures.terminate)
    try:
        yield
    finally:
        answer_sigterm(trainer, None)
