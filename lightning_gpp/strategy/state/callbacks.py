"""Adapts Lightning's callbacks and loops to ranks that hold parts of the module."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ThroughputMonitor
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.strategy.lightning_private import averages_kept_by, is_overridden, throughputs_of
from lightning_gpp.strategy.state.partition import Partition


class HeldAverage:
    """A callback's average of the module (EMA, SWA), of which this rank has its own part.

    Such a callback goes through the parameters of both, and exchanges them for validation. The rest
    is on ``meta``, where arithmetic costs nothing. The copy's state dict is that of all ranks
    together, so that checkpoints are those of one device. All ranks make it, and call
    :meth:`reunite`, together.

    Args:
        average: the copy, whole on rank 0.
        partition: of the module.
    """

    def __init__(self, average: nn.Module, partition: Partition) -> None:
        self._average = average
        inner = average.module if isinstance(average, AveragedModel) else average
        self._partition = partition.of_copy(inner)
        self._partition.spread()
        self._replaced = ExitStack()
        for name in ("state_dict", "to"):
            method = getattr(self, f"_{name}")
            self._replaced.enter_context(instance_attribute(average, name, method))

    def _state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """All ranks: on rank 0 the state dict of all; elsewhere with ``meta`` tensors."""
        with self._partition.whole():
            state: dict[str, Any] = type(self._average).state_dict(self._average, *args, **kwargs)
        return state

    def _to(self, device: Any) -> nn.Module:
        """Moves what this rank has; there is nothing to move on ``meta``."""
        self._partition.move(device)
        return self._average

    def reunite(self, *, on_all_ranks: bool) -> None:
        """All ranks: the copy is whole again on rank 0, or everywhere."""
        self._replaced.close()
        self._partition.reunite(on_all_ranks=on_all_ranks)


def held_averages(trainer: pl.Trainer, partition: Partition) -> list[HeldAverage]:
    """All ranks: divides the averages that callbacks keep, as the module is divided."""
    averages = averages_kept_by(trainer.callbacks)  # type: ignore[attr-defined]
    return [HeldAverage(average, partition) for average in averages]


def finetuning_hooks(
    trainer: pl.Trainer, whole_optimizers: Callable[[], AbstractContextManager[None]]
) -> ExitStack:
    """Finetuning callbacks see the parameter groups of one device until the stack is closed.

    Such a callback adds parameter groups in ``on_train_epoch_start``: those parameters of some
    modules that no group has yet. A rank's groups lack what other ranks hold, and Lightning
    compares values, which tensors on ``meta`` do not have; so parameters are compared by identity.

    Args:
        trainer: with the callbacks.
        whole_optimizers: within it optimizers have the parameters of one device.
    """
    stack = ExitStack()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BaseFinetuning):
            hook = callback.on_train_epoch_start

            def on_whole_groups(*args: Any, hook: Callable[..., Any] = hook, **kwargs: Any) -> Any:
                with whole_optimizers(), instance_attribute(torch, "equal", operator.is_):
                    return hook(*args, **kwargs)

            wrapped = functools.wraps(hook)(on_whole_groups)
            stack.enter_context(instance_attribute(callback, "on_train_epoch_start", wrapped))
    return stack


def count_pipelines(trainer: pl.Trainer, num_pipelines: int) -> None:
    """Lightning's ``ThroughputMonitor`` counts a pipeline as one replica, with all its devices.

    It multiplies the samples per second that it sees on rank 0 by the number of ranks, which is
    right where every rank trains on samples of its own.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ThroughputMonitor):
            for each in throughputs_of(callback):
                if each.available_flops is not None:
                    each.available_flops *= each.world_size // num_pipelines
                each.world_size = num_pipelines


def clear_old_gradients(trainer: pl.Trainer) -> None:
    """Clears gradients where Lightning is about to do the same and no hook would notice.

    Lightning clears them between a training step and its backward. Where the step itself runs
    forwards and backwards, the old gradients would lie beside the new ones until it is over: once
    more the memory of the weights.
    """
    is_first = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
    module, hook = trainer.lightning_module, "on_before_zero_grad"
    is_watched = (
        is_overridden("optimizer_zero_grad", module)
        or is_overridden(hook, module)
        or any(is_overridden(hook, callback, pl.Callback) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    )
    if is_first and not is_watched:
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
