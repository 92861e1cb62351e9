"""Runs the user's step per micro-batch inside a schedule, suspended at its forward.

Schedules that save memory (1F1B) begin the backward of a micro-batch before the forward of others,
so the user's step has to run for every micro-batch, in the middle of the schedule. Where the
pipeline does not drain, the steps of several mini-batches are open at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from lightning_gpp.capture.checks.rollback import rollback
from lightning_gpp.capture.values.arguments import OtherFormError
from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.common.torch_device import current_stream
from lightning_gpp.runtime.gradients import GradientStash
from lightning_gpp.runtime.run_state import Boundary
from lightning_gpp.runtime.suspend import StepThreads, SuspendedCall, running_call
from lightning_gpp.strategy.cutting.cutting import combine_results
from lightning_gpp.strategy.cutting.microbatches import copy_tensors, cut_batch
from lightning_gpp.strategy.forms import use_form_of
from lightning_gpp.strategy.logging.logs import LogCall, joined_calls, noted, recording, replay
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.planning.planning import Example
from lightning_gpp.strategy.ranks.messages import Autocast

Step = Callable[[Any], Any]

_OR_ONCE = "or use schedule='gpipe', which runs the step once on the whole batch"


class OpenStep(SuspendedCall):
    """The user's step on one batch or micro-batch, while it runs.

    Args:
        run: of this rank.
        call: the step.
        size: samples.
        threads: where it runs.

    Attributes:
        logged: its calls of ``self.log`` so far.
        result: what it returned, without the graph, which would keep what the last stage read.
    """

    def __init__(
        self, run: PipelinedRun, call: Callable[[], Any], size: int, threads: StepThreads
    ) -> None:
        super().__init__(call, threads)
        self._run, self.size = run, size
        self.logged: list[LogCall] = []
        self.result: Any = None

    @cached_property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Runs the step up to its call of the pipelined forward, and returns the call's arguments.

        Raises:
            RuntimeError: it does not call it.
        """
        with self._keeping_leaves():
            arguments = self.start()
        if not self.is_paused:
            raise RuntimeError(
                "training_step returned without calling the pipelined forward of "
                f"{type(self._run.target).__name__}. With the schedule '1f1b' it has to call "
                "it (self(...)); name the sub-module that it calls (GraphPipeStrategy("
                f"module='...')), {_OR_ONCE}"
            )
        return arguments  # type: ignore[no-any-return]

    def _keeping_leaves(self) -> contextlib.AbstractContextManager[None]:
        """The user's step runs in this; it may be what the model is captured by."""
        pipeline = self._run.pipeline
        known = pipeline is not None and pipeline.captured.frozen.keeping_leaves()
        return known or contextlib.nullcontext()

    def inputs(self) -> Mapping[str, Tensor]:
        """The arguments by value name.

        Raises:
            ValueError: the step calls forward in another form than the first step did.
        """
        try:
            return self._run.built.captured.inputs_of_call(*self.arguments)
        except OtherFormError as error:
            either = "use schedule='gpipe', which captures every form of call"
            raise ValueError(f"{error}, or {either}") from None

    @property
    def needs(self) -> frozenset[str]:
        """The arguments that need a gradient, which is the same for all steps of a mini-batch."""
        return frozenset(name for name, tensor in self.inputs().items() if tensor.requires_grad)

    def finish(self, outputs: Mapping[str, Any]) -> Tensor:
        """Goes on with it; returns its loss."""
        with self._keeping_leaves():
            result = self.resume(self._run.built.captured.output(outputs))
        if self.is_paused:
            raise RuntimeError(
                "training_step called the pipelined forward a second time. With the schedule "
                f"'1f1b' it can be called once: concatenate the inputs of both calls, {_OR_ONCE}"
            )
        self.result = pytree.tree_map_only(Tensor, Tensor.detach, result)
        return microbatch_loss(result)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stands in for ``self.log``.

        Raises:
            NotImplementedError: a metric is logged for every step.
        """
        call = noted(self._run.module, name, value, args, kwargs)
        if isinstance(value, Metric) and call.kwargs.get("on_step") in (None, True):
            raise NotImplementedError(
                f"self.log({name!r}, metric) on every step: with the schedule '1f1b' a metric "
                "sees one micro-batch at a time, so its value is not that of the batch. Log it "
                "with on_step=False, on_epoch=True, or use schedule='gpipe'."
            )
        self.logged.append(call)


class SuspendedSteps(Boundary):
    """Connects suspended steps to the pipeline, on rank 0.

    Args:
        run: whose pipeline they run in.

    Attributes:
        steps: by the number of their micro-batch.
    """

    def __init__(self, run: PipelinedRun) -> None:
        self._run, self._threads = run, StepThreads()
        self.steps: dict[int, OpenStep] = {}

    @contextlib.contextmanager
    def intercepting(self) -> Iterator[None]:
        """Intercepts the forward and ``self.log`` of steps that run in the body."""
        target, device = self._run.target, self._run.device
        forward = target.forward
        around = Autocast.current(device).dtype_in_use, current_stream(device)

        def pause(*args: Any, **kwargs: Any) -> Any:
            if (call := running_call()) is None:
                return forward(*args, **kwargs)
            if (Autocast.current(device).dtype_in_use, current_stream(device)) != around:
                raise NotImplementedError(
                    "the pipelined forward was called under another torch.autocast than the "
                    "Trainer's precision has, or on a stream of its own, which would not reach its "
                    "stages with the schedule '1f1b'; put that inside of forward, use "
                    f"Trainer(precision=...), {_OR_ONCE}"
                )
            return call.ask((args, kwargs))

        def log(*args: Any, **kwargs: Any) -> None:
            step = running_call()
            assert isinstance(step, OpenStep), "user code runs in steps alone"
            step.log(*args, **kwargs)

        with (
            instance_attribute(target, "forward", pause),
            instance_attribute(target, "_compiled_call_impl", None),  # it is that of its stages
            recording(self._run.module, log),
        ):
            yield

    def start(self, microbatch: int) -> Mapping[str, Tensor]:
        """The arguments of its forward; its step runs up to there."""
        inputs = self.steps[microbatch].inputs()
        self._run.built.captured.check_reads()  # which the step may have set
        return inputs

    def finish(self, microbatch: int, outputs: Mapping[str, Any]) -> Tensor:
        """Goes on with its step; returns its loss."""
        return self.steps[microbatch].finish(outputs)

    def abandon(self) -> None:
        """Ends steps that wait for their outputs."""
        for step in self.steps.values():
            step.abandon()
        self.steps.clear()

    def _step(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
        """The user's step as a function of its batch alone."""
        run = self._run
        method = getattr(run.module, name)
        autocast, stream = Autocast.current(run.device), current_stream(run.device)

        def step(batch: Any) -> Any:
            if stream is not None:  # this is another thread
                torch.accelerator.set_stream(stream)
            with autocast.on(run.device), run.held_elsewhere():
                return method(batch, *args, **kwargs)

        return step

    def _open(self, step: Step, batch: Any, size: int) -> OpenStep:
        return OpenStep(self._run, partial(step, batch), size, self._threads)

    def _build(self, name: str, step: Step, batch: Any, num_samples: int) -> None:
        """Builds the pipeline of the step's call; its first micro-batch runs up to its forward.

        It leaves no trace: random states, buffers and plain attributes of the module are put back.
        """
        run = self._run
        units = run.unit_sizes(num_samples)
        first = self._open(step, cut_batch(copy_tensors(batch), units)[0], units[0])
        with (
            run.control.alone(name),
            run.leader_state.preserved(),
            rollback(run.module),
            self.intercepting(),
        ):
            try:
                arguments = first.arguments
            finally:
                first.abandon()
                run.stop_early_modules()  # before buffers are put back
        example = Example(*arguments, num_samples, len(units))
        use_form_of(run, *arguments, lambda: example)

    def _returned(self, steps: Sequence[OpenStep], batch: Any, stash: GradientStash) -> Any:
        """What a step returns whose backward is over; the others know it, too.

        Args:
            steps: those that are over.
            batch: of all of them.
            stash: the gradients, which the backward of the returned loss hands out.
        """
        result = combine_results([step.result for step in steps], [step.size for step in steps])
        calls = joined_calls([(call, step.size) for step in steps for call in step.logged], batch)
        replay(self._run.module, calls)
        value = loss_in(result)
        self._run.interrupt.hold()
        self._run.lead_end(calls, value)
        return with_loss(result, stash.loss(value))

    def close(self) -> None:
        """Ends the steps that wait, and their threads."""
        self.abandon()
        self._threads.close()


def loss_in(result: Any) -> Any:
    """The loss in a step's result; None if there is none."""
    return result.get("loss") if isinstance(result, Mapping) else result


def with_loss(result: Any, loss: Tensor) -> Any:
    """A step's result with another loss."""
    return {**result, "loss": loss} if isinstance(result, Mapping) else loss


def check_is_here(loss: Tensor) -> None:
    """Raises RuntimeError, with the remedy, where a loss depends on what other ranks hold."""
    if loss.is_meta:
        raise RuntimeError(
            "the loss depends on parameters that another rank holds (a penalty over "
            "self.parameters(), say). Use the optimizer's weight_decay, or compute it inside the "
            "pipelined forward."
        )


def microbatch_loss(result: Any) -> Tensor:
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
    check_is_here(loss)
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
