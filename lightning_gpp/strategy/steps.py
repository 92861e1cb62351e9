"""The user's step at the pipeline's boundary: a call per micro-batch, suspended at its forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_gpp.capture import CapturedModel
from lightning_gpp.capture.rollback import rollback
from lightning_gpp.runtime.suspend import (
    Paused,
    Returned,
    StepThreads,
    SuspendedCall,
    ask,
    in_suspended_call,
)
from lightning_gpp.strategy.carried_state import carried_attributes, refuse_carried_state
from lightning_gpp.strategy.instance_attribute import instance_attribute
from lightning_gpp.strategy.logged_rules import LoggedNumber, LoggedRules
from lightning_gpp.strategy.logger_calls import LoggerCalls
from lightning_gpp.strategy.logs import LogCall, LogRecorder, recording, size_for_logs
from lightning_gpp.strategy.metric_calls import MetricCalls
from lightning_gpp.strategy.results import combine_results

LOSS_CHECK = "loss check"
"""Name of the step that :mod:`lightning_gpp.strategy.loss_check` runs before training."""


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """The arguments with which a step called the pipelined forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class StepBoundary:
    """Runs the user's step for every micro-batch and joins it to the pipeline.

    Args:
        module: the LightningModule.
        target: the module whose forward is pipelined.
        step: the user's step with everything bound but the batch.
        name: of the step (``"training_step"``).
        microbatches: the batches to call it with.
        sizes: samples of each.
        is_training: whether the step returns a loss to train on.
        threads: where the steps run.
        is_shape_only: whether tensors have no numbers.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        target: nn.Module,
        step: Callable[[Any], Any],
        *,
        name: str,
        microbatches: Sequence[Any],
        sizes: Sequence[int],
        is_training: bool,
        threads: StepThreads,
        is_shape_only: bool = False,
    ) -> None:
        self.captured: CapturedModel | None = None
        self._module = module
        self._target = target
        self._name = name
        self._sizes = sizes
        self._is_training = is_training
        self._is_shape_only = is_shape_only
        self._metric_calls = MetricCalls(module, sizes)
        self._recorder = LogRecorder(module, self._metric_calls)
        self._logger_calls = LoggerCalls(module.trainer.loggers, sizes)
        self._steps = [SuspendedCall(partial(step, batch), threads) for batch in microbatches]
        self._calls: dict[int, ForwardCall] = {}
        self._carried: dict[int, dict[str, Any]] = {}
        self._is_cut = len(sizes) > 1 or name == LOSS_CHECK
        self._results: dict[int, Any] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Intercepts the forward and ``self.log`` while the pipeline runs."""
        forward = self._target.forward

        def pause(*args: Any, **kwargs: Any) -> Any:
            if not in_suspended_call():
                return forward(*args, **kwargs)
            return ask(ForwardCall(args, kwargs))

        try:
            with (
                instance_attribute(self._target, "forward", pause),
                recording(self._module, self._recorder),
                self._metric_calls.active(),
                self._logger_calls.active(),
            ):
                yield
        finally:
            for step in self._steps:
                step.abandon()

    def call(self, microbatch: int) -> ForwardCall:
        """How the step of a micro-batch calls the pipelined forward; runs it up to there."""
        if microbatch not in self._calls:
            self._turn_to(microbatch)
            event = self._steps[microbatch].start()
            if isinstance(event, Returned):
                raise self.no_call()
            assert isinstance(event.question, ForwardCall)
            self._calls[microbatch] = event.question
            if self._is_cut:
                self._carried[microbatch] = carried_attributes(self._module, event.question)
        return self._calls[microbatch]

    def first_call(self) -> ForwardCall | None:
        """How the first micro-batch's step calls the pipelined forward; None if it does not."""
        event = self._steps[0].start()
        return None if isinstance(event, Returned) else event.question

    def no_call(self) -> RuntimeError:
        """The error of a step that has to call the pipelined forward and does not."""
        what = type(self._target).__name__
        return RuntimeError(
            f"{self._name} returned without calling the pipelined forward of {what}. Call "
            "it (self(...)), or name the sub-module that the step calls: "
            "GraphPipeStrategy(module='...')."
        )

    def start(self, microbatch: int) -> Mapping[str, Tensor]:
        """The arguments of the pipelined forward, by value name."""
        call = self.call(microbatch)
        assert self.captured is not None
        return self.captured.inputs(call.args, call.kwargs)

    def finish(self, microbatch: int, outputs: Mapping[str, Any]) -> Tensor | None:
        """Goes on with the step; returns its loss times the share of its samples."""
        assert self.captured is not None
        self._turn_to(microbatch)
        event = self._steps[microbatch].resume(self.captured.output(outputs))
        if isinstance(event, Paused):
            raise RuntimeError(
                f"{self._name} called the pipelined forward a second time. It can be called once "
                "per step: concatenate the inputs of both calls, or pipeline a sub-module that is "
                "called once (GraphPipeStrategy(module='...'))."
            )
        refuse_carried_state(self._module, self._carried.pop(microbatch, {}))
        self._results[microbatch] = event.value
        if len(self._results) == len(self._sizes):
            self._metric_calls.join()
        if not self._is_training:
            return None
        loss = _loss_of(event.value, is_shape_only=self._is_shape_only)
        return loss * (self._sizes[microbatch] / sum(self._sizes))

    def _turn_to(self, microbatch: int) -> None:
        """Notes whose logs and metric calls come next."""
        self._recorder.microbatch_size = self._sizes[microbatch]
        self._recorder.microbatch = microbatch
        self._metric_calls.microbatch = self._logger_calls.microbatch = microbatch

    def result(self) -> Any:
        """What the step returns for the whole mini-batch, gradients cut off."""
        results = [self._results[index] for index in range(len(self._sizes))]
        return combine_results(results, self._sizes)

    def logged(self) -> dict[str, LoggedNumber]:
        """The numbers that the step logged for each micro-batch, by name."""
        return self._recorder.numbers() | self._logger_calls.numbers()

    def call_loggers(self, rules: LoggedRules) -> None:
        """Makes the step's calls of ``log_metrics``, joined likewise."""
        self._logger_calls.make(rules)

    def log_calls(self, batch: Any, rules: LoggedRules) -> list[LogCall]:
        """The step's ``self.log`` calls, joined over the micro-batches of a mini-batch."""
        needs_size = self._recorder.needs_size  # Lightning warns where it looks one up in vain
        size = size_for_logs(batch) or sum(self._sizes) if needs_size else None
        return self._recorder.combined(size, rules)


def first_call(module: nn.Module, boundary: StepBoundary) -> ForwardCall | None:
    """How the user's step calls the pipelined forward, found out without a trace of the call.

    None if it does not call it.

    The step of the first micro-batch runs up to its forward and is given up there; random states,
    buffers and plain attributes of the module are put back. Gradients are on, also when the first
    step is one of validation: capture has to see which arguments will need them.
    """
    with rollback(module), torch.inference_mode(False), torch.enable_grad(), boundary.active():
        return boundary.first_call()


def _loss_of(result: Any, *, is_shape_only: bool) -> Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"training_step returned {type(result).__name__}; expected a loss tensor or a dict "
            "with the key 'loss'. Skipping a step by returning None is not possible here."
        )
    if loss.is_meta and not is_shape_only:
        raise RuntimeError(
            "the loss depends on parameters that another rank holds (a penalty over "
            "self.parameters(), say). Use the optimizer's weight_decay, or compute it inside the "
            "pipelined forward."
        )
    if loss.numel() != 1:
        raise ValueError(
            f"the loss of a micro-batch has shape {tuple(loss.shape)}; expected one number"
        )
    if not loss.requires_grad:
        raise RuntimeError(
            "the loss that training_step returned requires no gradient, so nothing would be "
            "trained; was it made under torch.no_grad(), detached, or are all parameters frozen?"
        )
    return loss.reshape(())
