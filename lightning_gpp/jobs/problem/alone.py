"""What batches of a recipe take one process of this machine beside operators."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
from omegaconf import DictConfig

from lightning_gpp.cluster import Cluster
from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.common.progress import doing
from lightning_gpp.jobs.problem.first_call import SeenError, on_one_device
from lightning_gpp.jobs.problem.problem import strategy_option
from lightning_gpp.jobs.problem.recipe_problem import threads_of_one_of
from lightning_gpp.reports.plan.verdict import BatchTimes
from lightning_gpp.strategy.pipeline import pipelined_module
from lightning_gpp.strategy.recording.batch_clock import (
    ENOUGH_S,
    FEWEST_COUNTED,
    NUM_WARM_UP,
    BatchClock,
)
from lightning_gpp.strategy.report import show


def batches_alone(config: DictConfig, cluster: Cluster, one_device_s: float) -> BatchTimes | None:
    """Trains a recipe in one process for a second, and times its batches.

    Args:
        config: of the run.
        cluster: processes of this machine, of which one trains.
        one_device_s: predicted seconds of the operators of a batch.

    Returns:
        With the time beside the forward and its backward apart. None where batches are so long that
        a few of them take more than the second: their operators are nearly all of them.
    """
    if (NUM_WARM_UP + FEWEST_COUNTED) * one_device_s > ENOUGH_S:
        return None
    timed = _Timed()
    endless = {"max_epochs": -1, "max_steps": -1, "limit_val_batches": 0}
    trainer, module, data = on_one_device(config, callbacks=[timed], accelerator="cpu", **endless)
    target = pipelined_module(module, strategy_option(config, "module"))
    forward = target.forward

    def timed_forward(*args: Any, **kwargs: Any) -> Any:
        start_s = time.monotonic()
        outputs = forward(*args, **kwargs)
        timed.operators_s += time.monotonic() - start_s
        return outputs

    with (
        doing("Training in one process", show),
        threads_of_one_of(cluster),
        instance_attribute(target, "forward", timed_forward),
        suppress(SeenError),
    ):
        trainer.fit(module, datamodule=data)
    return timed.clock.found


class _Timed(pl.Callback):
    """Times batches, and the forwards and backwards in them; ends when there are enough."""

    def __init__(self) -> None:
        self.clock = BatchClock()
        self.operators_s = 0.0
        self._backward_began_s = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """A batch begins.

        Raises:
            SeenError: there were enough.
        """
        if self.clock.begin(in_pipeline_s=self.operators_s):
            raise SeenError

    def on_before_backward(self, *_: Any) -> None:
        """A backward begins."""
        self._backward_began_s = time.monotonic()

    def on_after_backward(self, *_: Any) -> None:
        """It is over."""
        self.operators_s += time.monotonic() - self._backward_began_s
