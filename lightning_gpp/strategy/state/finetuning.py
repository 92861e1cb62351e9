"""Lightning's finetuning callbacks (``BackboneFinetuning`` and the user's own) on every rank.

Such a callback adds parameter groups in ``on_train_epoch_start``: those parameters of some modules
that no group has yet. A rank's groups lack what other ranks hold, and Lightning compares values,
which tensors on ``meta`` do not have. So the callback sees the groups of one device, and
parameters are compared by identity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch.overrides import TorchFunctionMode

from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.strategy.pipelined_run import PipelinedRun


def finetuning_hooks(trainer: pl.Trainer, run: PipelinedRun) -> ExitStack:
    """Puts itself between the Trainer and its finetuning callbacks until the stack is closed."""
    stack = ExitStack()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BaseFinetuning):
            hook = _on_whole_groups(callback.on_train_epoch_start, run)
            stack.enter_context(instance_attribute(callback, "on_train_epoch_start", hook))
    return stack


def _on_whole_groups(hook: Callable[..., Any], run: PipelinedRun) -> Callable[..., Any]:
    @functools.wraps(hook)
    def with_whole_groups(*args: Any, **kwargs: Any) -> Any:
        with run.whole_optimizers(), SameParameter():
            return hook(*args, **kwargs)

    return with_whole_groups


class SameParameter(TorchFunctionMode):
    """While active, ``torch.equal`` asks whether two tensors are one object."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.equal:
            return args[0] is args[1]
        return func(*args, **(kwargs or {}))
