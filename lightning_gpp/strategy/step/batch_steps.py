"""The user's steps, run once per batch on rank 0, in the caller's thread."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_gpp.capture.checks.rollback import ModuleState
from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.strategy.lightning_private import keep_results
from lightning_gpp.strategy.logging.logs import LedLog, recording, replay
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.messages import BackwardEnd, HookEnd, StepEnd, StepPerMicrobatch
from lightning_gpp.strategy.step.followers import Follower
from lightning_gpp.strategy.step.forward_calls import BeginAnewError, ForwardCalls
from lightning_gpp.strategy.step.loaders import LedDataloaderIter
from lightning_gpp.strategy.step.losses import check_is_here, loss_in, with_loss
from lightning_gpp.strategy.torch_private import when_backward_ends


class BatchSteps:
    """How rank 0 leads a step of any kind, and how the others follow.

    Args:
        run: whose pipeline runs the calls of the forward.
        follower: what other ranks do.
        forward: stands in for the pipelined forward on rank 0.
    """

    def __init__(self, run: PipelinedRun, follower: Follower, forward: ForwardCalls) -> None:
        self._run, self._follower, self._forward = run, follower, forward

    def lead(self, name: str, batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Rank 0: runs the user's step; returns what it returns.

        Raises:
            BeginAnewError: the plan that was made in it needs a step for every micro-batch.
        """
        with self._run.clock.pipeline():
            return self._lead(name, batch, args, kwargs)

    def _lead(self, name: str, batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        run = self._run
        # Which schedule runs may be known only once the step has called its forward.
        is_open = run.pipeline is None and run.settings.schedule is None
        before = _Before(run.module) if is_open and name == "training_step" else None
        log = LedLog(run.module)
        try:
            with self._leading(name, log), run.clock.user():
                result = getattr(run.module, name)(batch, *args, **kwargs)
        except BeginAnewError:
            assert before is not None
            before.restore()
            run.lead(StepPerMicrobatch())
            raise
        loss = loss_in(result) if name == "training_step" else None
        loss = loss if isinstance(loss, Tensor) else None
        if loss is not None:
            check_is_here(loss, is_shape_only=run.is_shape_only)  # before others are told of it
        looked_up = None if isinstance(batch, LedDataloaderIter) else batch
        calls = [] if run.is_alone else log.calls(looked_up)
        run.lead_end(calls, None if loss is None else loss.detach())
        if loss is None or not run.module.automatic_optimization:
            return result
        return with_loss(result, led_backward(loss, run))

    @contextlib.contextmanager
    def _leading(self, name: str, log: LedLog) -> Iterator[None]:
        """Rank 0: user code runs in this, here and nowhere else."""
        run = self._run
        target = run.target
        self._forward.inner = target.__dict__.get("forward")
        functools.update_wrapper(self._forward, target.forward, updated=())
        with (
            run.control.alone(name),
            run.leader_state.watching(name),
            instance_attribute(target, "forward", self._forward),
            instance_attribute(target, "_compiled_call_impl", None),  # it is that of its stages
            nullcontext() if run.is_alone and not run.is_shape_only else recording(run.module, log),
            run.held_elsewhere(),
        ):
            yield

    def lead_hook(
        self,
        name: str,
        hook: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Rank 0: runs a hook of the user's."""
        log = LedLog(self._run.module)
        with self._leading(name, log):
            answer = hook(*args, **kwargs)
        self._run.lead(HookEnd(answer, log.calls()))
        return answer

    def follow_hook(self, name: str) -> Any:
        """Other ranks: what it returned."""
        end = self._follower.until(HookEnd, doing=name)
        replay(self._run.module, end.logs)
        return self._run.on_device(end.answer)

    def follow(self, name: str) -> StepPerMicrobatch | Tensor | None:
        """Other ranks: a loss whose backward follows rank 0's; None if the step has none."""
        run = self._run
        end = self._follower.until(StepEnd, StepPerMicrobatch, doing=name)
        if not isinstance(end, StepEnd):
            return StepPerMicrobatch()
        run.follow_end(end)
        value = self._follower.value
        if not isinstance(value, Tensor) or name != "training_step":
            return None
        value = run.on_device(value)
        return self._follower.loss(value) if run.module.automatic_optimization else value


class _Before:
    """What a training step that may begin anew finds; :meth:`restore` puts it back."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._state, self._put_back = ModuleState(module), keep_results(module.trainer)

    def restore(self) -> None:
        self._state.restore()
        self._put_back()


def led_backward(loss: Tensor, run: PipelinedRun) -> Tensor:
    """The same loss, whose backward the other ranks, if there are any, follow to its end."""
    if run.is_alone:
        return loss
    led: Tensor = _Led.apply(loss, lambda: run.lead(BackwardEnd()))  # type: ignore[no-untyped-call]
    return led


class _Led(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, tell_end: Callable[[], None]) -> Tensor:
        ctx.tell_end = tell_end
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        when_backward_ends(ctx.tell_end)
        return gradients[0], None
