"""The user's step at the pipeline's boundary: a call per micro-batch, suspended at its forward.

Schedules that save memory (1F1B) begin the backward of a micro-batch before the forward of others,
so the user's step has to run for every micro-batch, in the middle of the schedule.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_gpp.capture import CapturedModel
from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.runtime.boundary import Boundary
from lightning_gpp.runtime.suspend import (
    Paused,
    Returned,
    StepThreads,
    SuspendedCall,
    ask,
    in_suspended_call,
)
from lightning_gpp.strategy.cutting.cutting import CannotJoinError, Values, join_values
from lightning_gpp.strategy.cutting.results import combine_results
from lightning_gpp.strategy.logging.logs import LogCall, MicrobatchLog, recording
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.messages import Autocast
from lightning_gpp.strategy.step.loss_check import OutputGradients
from lightning_gpp.strategy.step.losses import OR_ONCE, microbatch_loss


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """The arguments with which a step called the pipelined forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class MicrobatchBoundary(Boundary):
    """Runs the user's step for every micro-batch and joins it to the pipeline.

    Args:
        run: of this rank.
        step: the user's step with everything bound but the batch.
        microbatches: the batches to call it with.
        sizes: samples of each.
        threads: where the steps run.

    Attributes:
        loss_scale: what losses are multiplied by before they go backward.
        seen: notes what the losses are differentiated to, where they are looked at.
    """

    def __init__(
        self,
        run: PipelinedRun,
        step: Callable[[Any], Any],
        microbatches: Sequence[Any],
        sizes: Sequence[int],
        threads: StepThreads,
    ) -> None:
        self.seen: Sequence[OutputGradients] = ()
        self.loss_scale = 1.0
        self._run, self._sizes = run, sizes
        self._autocast = Autocast.current(run.device)
        self._log = MicrobatchLog(run.module)
        self._steps = [SuspendedCall(partial(step, batch), threads) for batch in microbatches]
        self._calls: dict[int, ForwardCall] = {}
        self._results: dict[int, Any] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While the pipeline runs: steps meet it, and none is left suspended afterwards."""
        try:
            with self.intercepting():
                yield
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Ends steps that are suspended."""
        for step in self._steps:
            step.abandon()

    @property
    def _captured(self) -> CapturedModel:
        return self._run.built.captured

    @contextlib.contextmanager
    def intercepting(self) -> Iterator[None]:
        """Intercepts the forward and ``self.log`` of steps that run in the body."""
        target, device = self._run.target, self._run.device
        forward = target.forward

        @functools.wraps(forward)
        def pause(*args: Any, **kwargs: Any) -> Any:
            if not in_suspended_call():
                return forward(*args, **kwargs)
            if Autocast.current(device).dtype_in_use != self._autocast.dtype_in_use:
                raise NotImplementedError(
                    "the pipelined forward was called under another torch.autocast than the "
                    "Trainer's precision has, which would not reach its stages with the schedule "
                    f"'1f1b'; put it inside of forward, use Trainer(precision=...), {OR_ONCE}"
                )
            return ask(ForwardCall(args, kwargs))

        with (
            instance_attribute(target, "forward", pause),
            recording(self._run.module, self._log),
        ):
            yield

    def call(self, microbatch: int) -> ForwardCall:
        """How the step of a micro-batch calls the pipelined forward; runs it up to there.

        Raises:
            RuntimeError: it does not call it.
        """
        if microbatch not in self._calls:
            self._log.size = self._sizes[microbatch]
            event = self._steps[microbatch].start()
            if isinstance(event, Returned):
                raise RuntimeError(
                    "training_step returned without calling the pipelined forward of "
                    f"{type(self._run.target).__name__}. With the schedule '1f1b' it has to call "
                    "it (self(...)); name the sub-module that it calls (GraphPipeStrategy("
                    f"module='...')), {OR_ONCE}"
                )
            assert isinstance(event.question, ForwardCall)
            self._calls[microbatch] = event.question
        return self._calls[microbatch]

    def start(self, microbatch: int) -> Mapping[str, Tensor]:
        """The arguments of the pipelined forward, by value name."""
        call = self.call(microbatch)
        return self._captured.inputs(call.args, call.kwargs)

    def inputs(self) -> Values:
        """The arguments of all micro-batches' forwards, joined."""
        pieces = [self.start(index) for index in range(len(self._sizes))]
        return join_values(pieces, self._captured.graph.batch_dims, self._sizes)

    def is_call_of(self, inputs: Mapping[str, Tensor], microbatches: Sequence[int]) -> bool:
        """Whether these arguments are those of some micro-batches' forwards, one after the other.

        Batches of graphs are taken for that: their numbers of vertices are counted anew.
        """
        if self._captured.takes_graphs:
            return True
        pieces = [self.start(index) for index in microbatches]
        sizes = [self._sizes[index] for index in microbatches]
        try:
            joined = join_values(pieces, self._captured.graph.batch_dims, sizes)
        except CannotJoinError:
            return False
        return inputs.keys() == joined.keys() and all(
            torch.equal(tensor, joined[name]) for name, tensor in inputs.items()
        )

    def needs(self) -> frozenset[str]:
        """The arguments that need a gradient, which is the same for all micro-batches."""
        return frozenset(name for name, tensor in self.start(0).items() if tensor.requires_grad)

    def finish(self, microbatch: int, outputs: Mapping[str, Any]) -> Tensor:
        """Goes on with the step; returns its loss times the share of its samples, scaled."""
        self._log.size = self._sizes[microbatch]
        event = self._steps[microbatch].resume(self._captured.output(outputs))
        if isinstance(event, Paused):
            raise RuntimeError(
                "training_step called the pipelined forward a second time. With the schedule "
                f"'1f1b' it can be called once: concatenate the inputs of both calls, {OR_ONCE}"
            )
        # A result with its graph would keep what the last stage read and its gradients.
        self._results[microbatch] = pytree.tree_map_only(Tensor, Tensor.detach, event.value)
        loss = microbatch_loss(event.value, is_shape_only=self._run.is_shape_only)
        total = sum(self._sizes)
        loss = loss * (self._sizes[microbatch] / total) if total else loss
        for seen in self.seen:
            seen.take(microbatch, outputs, loss)
        return loss if self.loss_scale == 1 else loss * self.loss_scale

    def result(self) -> Any:
        """What the step returns for the whole mini-batch, gradients cut off."""
        results = [self._results[index] for index in range(len(self._sizes))]
        return combine_results(results, self._sizes)

    def log_calls(self, batch: Any) -> list[LogCall]:
        """The step's ``self.log`` calls, joined over the micro-batches of this mini-batch."""
        return self._log.calls(batch)
