"""The user's steps, run once per batch on rank 0, in the caller's thread."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.strategy.lightning_private import when_backward_ends
from lightning_gpp.strategy.logging.logs import LedLog, recording
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.messages import BackwardEnd, HookEnd
from lightning_gpp.strategy.step.forward_calls import ForwardCalls
from lightning_gpp.strategy.step.losses import check_is_here, loss_in, with_loss


class BatchSteps:
    """How rank 0 leads a step of any kind.

    Args:
        run: whose pipeline runs the calls of the forward.
        forward: stands in for the pipelined forward on rank 0.
    """

    def __init__(self, run: PipelinedRun, forward: ForwardCalls) -> None:
        self._run, self._forward = run, forward

    def lead(self, name: str, batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the user's step; returns what it returns.

        Raises:
            BeginAnewError: the plan that was made in it needs a step for every micro-batch.
        """
        run, log = self._run, LedLog(self._run.module)
        with run.clock.pipeline():
            with self._leading(name, log), run.clock.user():
                result = getattr(run.module, name)(batch, *args, **kwargs)
            loss = loss_in(result) if name == "training_step" else None
            if not isinstance(loss, Tensor):
                run.lead_end([] if run.is_alone else log.calls(batch), None)
                return result
            check_is_here(loss, is_shape_only=run.is_shape_only)  # before others are told of it
            run.lead_end([] if run.is_alone else log.calls(batch), loss.detach())
            if not run.module.automatic_optimization:
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

    def hook(
        self,
        name: str,
        hook: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Runs a hook of the user's; returns what it returns."""
        log = LedLog(self._run.module)
        with self._leading(name, log):
            answer = hook(*args, **kwargs)
        self._run.lead(HookEnd(answer, log.calls()))
        return answer


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
