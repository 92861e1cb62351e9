"""The user's step in the midst of a schedule: a call per micro-batch, suspended at its forward.

Schedules that save memory (1F1B) begin the backward of a micro-batch before the forward of others,
so the user's step has to run for every micro-batch, in the middle of the schedule.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_gpp.capture.checks.rollback import rollback
from lightning_gpp.capture.values.arguments import OtherFormError
from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.common.torch_device import set_current
from lightning_gpp.runtime.boundary import Boundary
from lightning_gpp.runtime.gradients import GradientStash
from lightning_gpp.runtime.suspend import StepThreads, SuspendedCall, running_call
from lightning_gpp.strategy.cutting.cutting import CannotJoinError, Values, join_values
from lightning_gpp.strategy.cutting.microbatches import copy_tensors, cut_batch
from lightning_gpp.strategy.cutting.results import combine_results
from lightning_gpp.strategy.forms import use_form_of
from lightning_gpp.strategy.logging.logs import LogCall, MicrobatchLog, recording, replay
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.planning.planning import Example
from lightning_gpp.strategy.ranks.messages import Autocast, Build
from lightning_gpp.strategy.step.loss_check import OutputGradients

Step = Callable[[Any], Any]

_OR_ONCE = "or use schedule='gpipe', which runs the step once on the whole batch"


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
        step: Step,
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
        self._calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
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

    @contextlib.contextmanager
    def intercepting(self) -> Iterator[None]:
        """Intercepts the forward and ``self.log`` of steps that run in the body."""
        target, device = self._run.target, self._run.device
        forward = target.forward

        @functools.wraps(forward)
        def pause(*args: Any, **kwargs: Any) -> Any:
            if (call := running_call()) is None:
                return forward(*args, **kwargs)
            if Autocast.current(device).dtype_in_use != self._autocast.dtype_in_use:
                raise NotImplementedError(
                    "the pipelined forward was called under another torch.autocast than the "
                    "Trainer's precision has, which would not reach its stages with the schedule "
                    f"'1f1b'; put it inside of forward, use Trainer(precision=...), {_OR_ONCE}"
                )
            return call.ask((args, kwargs))

        with (
            instance_attribute(target, "forward", pause),
            recording(self._run.module, self._log),
        ):
            yield

    def call(self, microbatch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the step of a micro-batch calls the pipelined forward with; runs it up to there.

        Raises:
            RuntimeError: it does not call it.
        """
        if microbatch not in self._calls:
            self._log.size = self._sizes[microbatch]
            arguments = self._steps[microbatch].start()
            if not self._steps[microbatch].is_paused:
                raise RuntimeError(
                    "training_step returned without calling the pipelined forward of "
                    f"{type(self._run.target).__name__}. With the schedule '1f1b' it has to call "
                    "it (self(...)); name the sub-module that it calls (GraphPipeStrategy("
                    f"module='...')), {_OR_ONCE}"
                )
            self._calls[microbatch] = arguments
        return self._calls[microbatch]

    def start(self, microbatch: int) -> Mapping[str, Tensor]:
        """The arguments of the pipelined forward, by value name."""
        return self._run.built.captured.inputs(*self.call(microbatch))

    def inputs(self, microbatches: Sequence[int] | None = None) -> Values | None:
        """The joined arguments of some micro-batches' forwards; None where they cannot be joined.

        Args:
            microbatches: their numbers; all by default.
        """
        numbers = range(len(self._sizes)) if microbatches is None else microbatches
        sizes = [self._sizes[number] for number in numbers]
        dims = self._run.built.captured.graph.batch_dims
        try:
            return join_values([self.start(number) for number in numbers], dims, sizes)
        except CannotJoinError:
            return None

    def is_call_of(self, inputs: Mapping[str, Tensor], microbatches: Sequence[int]) -> bool:
        """Whether these arguments are those of some micro-batches' forwards, one after the other.

        Batches of graphs are taken for that: their numbers of vertices are counted anew.
        """
        if self._run.built.captured.takes_graphs:
            return True
        joined = self.inputs(microbatches)
        return (
            joined is not None
            and inputs.keys() == joined.keys()
            and all(torch.equal(tensor, joined[name]) for name, tensor in inputs.items())
        )

    def needs(self) -> frozenset[str]:
        """The arguments that need a gradient, which is the same for all micro-batches."""
        return frozenset(name for name, tensor in self.start(0).items() if tensor.requires_grad)

    def finish(self, microbatch: int, outputs: Mapping[str, Any]) -> Tensor:
        """Goes on with the step; returns its loss times the share of its samples, scaled."""
        size, total = self._sizes[microbatch], sum(self._sizes)
        self._log.size = size
        result = self._steps[microbatch].resume(self._run.built.captured.output(outputs))
        if self._steps[microbatch].is_paused:
            raise RuntimeError(
                "training_step called the pipelined forward a second time. With the schedule "
                f"'1f1b' it can be called once: concatenate the inputs of both calls, {_OR_ONCE}"
            )
        # A result with its graph would keep what the last stage read and its gradients.
        self._results[microbatch] = pytree.tree_map_only(Tensor, Tensor.detach, result)
        loss = microbatch_loss(result, is_shape_only=self._run.is_shape_only)
        loss = loss * (size / total) if total else loss
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


class SuspendedSteps:
    """Rank 0: what all steps have in common that run in the midst of a schedule.

    Args:
        run: whose pipeline they run in.
    """

    def __init__(self, run: PipelinedRun) -> None:
        self._run = run
        self._threads = StepThreads()

    def _step(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
        """The user's step as a function of its batch alone."""
        run = self._run
        method = getattr(run.module, name)
        autocast = Autocast.current(run.device)

        def step(batch: Any) -> Any:
            set_current(run.device)  # this is another thread
            with autocast.on(run.device), run.held_elsewhere():
                return method(batch, *args, **kwargs)

        return step

    def _boundary(
        self, step: Step, parts: Sequence[Any], sizes: Sequence[int]
    ) -> MicrobatchBoundary:
        return MicrobatchBoundary(self._run, step, parts, sizes, self._threads)

    def _build(self, name: str, step: Step, batch: Any, num_samples: int) -> None:
        """Builds the pipeline of the step's call; its first micro-batch runs up to its forward.

        It leaves no trace: random states, buffers and plain attributes of the module are put back.
        """
        run = self._run
        units = run.unit_sizes(num_samples)
        boundary = self._boundary(step, cut_batch(copy_tensors(batch), units), units)
        with (
            run.control.alone(name),
            run.leader_state.preserved(),
            rollback(run.module),
            boundary.active(),
        ):
            try:
                arguments = boundary.call(0)
            finally:
                run.stop_early_modules()  # before buffers are put back
        example = Example(*arguments, num_samples, len(units))
        if run.pipeline is not None:
            try:
                run.built.captured.inputs(*arguments)
            except OtherFormError as error:
                use_form_of(run, *arguments, lambda: example, error)
            return
        autocast = Autocast.current(run.device)
        run.lead(Build(autocast))
        with autocast.while_building(run.device):
            run.build(example)

    def _returned(self, boundary: MicrobatchBoundary, batch: Any, stash: GradientStash) -> Any:
        """What a step returns that is over, as is its backward; the others know it, too.

        Args:
            boundary: of the step.
            batch: its batch.
            stash: the gradients, which the backward of the returned loss hands out.
        """
        result, calls = boundary.result(), boundary.log_calls(batch)
        replay(self._run.module, calls)
        value = loss_in(result)
        self._run.lead_end(calls, value)
        return with_loss(result, stash.loss(value))

    def close(self) -> None:
        """Ends the threads of the steps."""
        self._threads.close()


def loss_in(result: Any) -> Any:
    """What a step returned as its loss, if it did."""
    return result.get("loss") if isinstance(result, Mapping) else result


def with_loss(result: Any, loss: Tensor) -> Any:
    """What a step returned, with another loss."""
    return {**result, "loss": loss} if isinstance(result, Mapping) else loss


def check_is_here(loss: Tensor, *, is_shape_only: bool) -> None:
    """Raises RuntimeError, with the remedy, where a loss depends on what other ranks hold."""
    if loss.is_meta and not is_shape_only:
        raise RuntimeError(
            "the loss depends on parameters that another rank holds (a penalty over "
            "self.parameters(), say). Use the optimizer's weight_decay, or compute it inside the "
            "pipelined forward."
        )


def microbatch_loss(result: Any, *, is_shape_only: bool = False) -> Tensor:
    """The loss that a step returned for a micro-batch, which its backward can start from.

    Raises:
        TypeError, RuntimeError, ValueError: it is none; the text says why.
    """
    loss = loss_in(result)
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"training_step returned {type(result).__name__} for a micro-batch; with the schedule "
            f"'1f1b' it has to return a loss tensor or a dict with the key 'loss', {_OR_ONCE}"
        )
    check_is_here(loss, is_shape_only=is_shape_only)
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
