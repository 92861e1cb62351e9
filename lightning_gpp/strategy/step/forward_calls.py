"""Replaces the forward on rank 0 while the user's step, once per batch, calls it.

A call cuts its *arguments* into micro-batches, runs them through the stages of all ranks and
returns the joined outputs; the call is one node of the user's autograd graph (:class:`LedCall`).

Cutting is right only for a forward that treats every sample by itself. Whether it does is found
out, not assumed: before the first call in each mode, and again where samples differ in a new way,
the forward alone runs on a few of its samples, in one piece and cut. All other forwards (in-batch
similarities, a loss computed in forward) run through the stages in one piece, which is always right
and only less concurrent.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.capture import CapturedModel
from lightning_gpp.capture.values.arguments import OtherFormError
from lightning_gpp.capture.values.structure import LEAF, Structure, flatten
from lightning_gpp.common.instance_attribute import instance_attribute, taken_away
from lightning_gpp.gnn import ChunkedModel, Chunks, GraphTrainingError
from lightning_gpp.runtime.payload import tensors_in
from lightning_gpp.runtime.stage_run import StageCall, run_forward
from lightning_gpp.strategy.cutting.cutting import Values, at_rows, call_size, input_slices
from lightning_gpp.strategy.forms import use_form_of
from lightning_gpp.strategy.lightning_private import keeps_graph, when_backward_ends, will_reach
from lightning_gpp.strategy.logging.logs import LedLog, recording
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.planning.example import example_of
from lightning_gpp.strategy.ranks.messages import Autocast, Backward, BackwardEnd, Forward, HookEnd
from lightning_gpp.strategy.settings import FullGraph
from lightning_gpp.strategy.state.held_elsewhere import lifted
from lightning_gpp.strategy.step.cut_checks import CutChecks
from lightning_gpp.strategy.step.inputs_ahead import InputsAhead
from lightning_gpp.strategy.step.pipelined_call import CallBoundary, RankCall
from lightning_gpp.strategy.step.suspended_steps import check_is_here, loss_in, with_loss


class BeginAnewError(BaseException):
    """Ends the user's step, which then begins again and runs per micro-batch."""


class ForwardCalls:
    """Replaces the pipelined forward on rank 0.

    Args:
        run: the run whose pipeline executes it.

    Attributes:
        inner: a forward that the user set on the module itself; None if there is none.
        before: called before each call.
    """

    inner: Any = None

    def __init__(self, run: PipelinedRun) -> None:
        self._run = run
        self._checks = CutChecks(run)
        self._ahead = InputsAhead(run)
        self._num_calls = 0
        self.before: Callable[[], None] = lambda: None

    def __reduce__(self) -> Any:
        """It belongs to a run, which has no copy either."""
        return type(None), ()

    def lead(self, name: str, batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the user's step of any kind once per batch, here; returns what it returns.

        Raises:
            BeginAnewError: the plan that was made in it needs a step for every micro-batch.
        """
        run, log, is_training = self._run, LedLog(self._run.module), name == "training_step"
        if is_training and run.train_batches is not None:
            self._ahead.begin(batch)
        with self._leading(name, log):
            result = getattr(run.module, name)(batch, *args, **kwargs)
        loss = loss_in(result) if is_training else None
        value = loss.detach() if isinstance(loss, Tensor) else None
        if value is not None:  # before others are told of it
            check_is_here(value)
        run.lead_end([] if run.is_alone else log.calls(batch), value)
        if not isinstance(loss, Tensor) or not run.module.automatic_optimization:
            return result
        self._ahead.read()
        return with_loss(result, led_backward(loss, run))

    def hook(
        self, name: str, hook: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs a hook of the user's; returns what it returns."""
        log = LedLog(self._run.module)
        with self._leading(name, log):
            answer = hook(*args, **kwargs)
        self._run.lead(HookEnd(answer, log.calls()))
        return answer

    @contextlib.contextmanager
    def _leading(self, name: str, log: LedLog) -> Iterator[None]:
        """Rank 0: user code runs in this, here and nowhere else."""
        run, target = self._run, self._run.target
        if run.stays_whole:
            with run.control.alone(name):
                yield
            return
        self.inner = target.__dict__.get("forward")
        functools.update_wrapper(self, target.forward, updated=())
        with (
            run.control.alone(name),
            run.leader_state.watching(name),
            instance_attribute(target, "forward", self),
            instance_attribute(target, "_compiled_call_impl", None),  # it is that of its stages
            nullcontext() if run.is_alone else recording(run.module, log),
            run.held_elsewhere(),
        ):
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What forward returns."""
        start_s = time.monotonic()
        self.before()
        with lifted():
            inputs = self._inputs(args, kwargs)
            captured = self._run.built.captured
            captured.check_reads()
            is_trained = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            units = self._units(captured, inputs, is_trained)
            training, chunked = captured.module.training, self._run.built.chunked
            if chunked is not None and is_trained and training:
                values = self._in_chunks(captured, chunked, inputs)
            elif (only := self._run.built.only_stage(units)) is not None:
                call = StageCall(training=training)
                flight = run_forward(only, inputs, call, has_backward=is_trained)
                values = flight.inputs | flight.outputs
            else:
                message, boundary = self._message(captured, inputs, units, is_trained=is_trained)
                values = self._led(message, boundary, inputs)
            output = captured.output(values)
        self._run.in_pipeline_s += time.monotonic() - start_s
        return output

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The arguments by name, with the pipeline of their form in use on all ranks.

        Raises:
            BeginAnewError: the plan that was made needs a step for every micro-batch.
        """
        run, pipeline = self._run, self._run.pipeline
        try:
            if pipeline is not None:
                return pipeline.captured.inputs_of_call(args, kwargs)
        except OtherFormError:
            pass
        run.stop_early_modules()
        run.inputs_ahead = self._ahead.is_likely(args, kwargs)
        with taken_away(run.target, "forward", self.inner), run.control.together():
            use_form_of(
                run, args, kwargs, lambda: example_of(run.target, args, kwargs, run.unit_sizes)
            )
        is_first = pipeline is None and run.control.alone_in == "training_step"
        if is_first and run.suspends_steps:
            raise BeginAnewError
        return run.built.captured.inputs_of_call(args, kwargs)

    def _units(
        self, captured: CapturedModel, inputs: Mapping[str, Tensor], is_trained: bool
    ) -> list[int]:
        """Samples of each of the smallest micro-batches; one where the call cannot be cut."""
        run = self._run
        num_samples = call_size(captured, inputs)
        if (chunked := run.built.chunked) is not None:  # one graph in one piece
            if num_samples != chunked.chunks.num_vertices:
                found = "other inputs" if num_samples is None else num_samples
                raise GraphTrainingError(
                    f"the first call of forward had a graph of {chunked.chunks.num_vertices} "
                    f"vertices, this one has {found}; full-graph training has one graph, use "
                    'strategy="graphpipe" for several'
                )
            return [num_samples]
        if num_samples is None:
            return [1]
        if is_trained:
            run.full_batch = max(run.full_batch, num_samples)
        units = run.unit_sizes(num_samples, is_training=is_trained)
        if len(units) > 1:
            if input_slices(captured, inputs, units) is None:
                return [num_samples]
            if not self._checks.can_cut(inputs, units, is_trained=is_trained):
                units = [num_samples]
        if captured.module.training:
            run.show_state(len(units))
        return units

    def _in_chunks(
        self, captured: CapturedModel, chunked: ChunkedModel, inputs: Mapping[str, Tensor]
    ) -> Values:
        """One epoch of one graph, whose vertices go in in the order of the chunks."""
        asked, chunks, graph = self._run.settings.full_graph, chunked.chunks, captured.graph
        assert asked is not None
        count = chunks.num_vertices
        if asked.begins_exact and not self._num_calls:
            filling = self._message(captured, inputs, [count], is_trained=False, fills=True)
            self._led(*filling, inputs)
        order = chunk_order(asked, chunks, self._run.module.global_step)
        rows = chunks.order_of(order)
        dims = {n: d for n, d in graph.batch_dims.items() if n not in graph.staying}
        ordered = at_rows(inputs, dims, rows, count)
        sizes = [chunks.sizes[chunk] for chunk in order]
        message = self._message(captured, ordered, sizes, is_trained=True, chunks=order)
        values = self._led(*message, ordered)
        return at_rows(values, graph.batch_dims, rows.argsort(), count)

    def _message(
        self,
        captured: CapturedModel,
        inputs: Mapping[str, Tensor],
        units: list[int],
        *,
        is_trained: bool,
        chunks: tuple[int, ...] = (),
        fills: bool = False,
    ) -> tuple[Forward, CallBoundary]:
        """What tells the other ranks of a call, and where it meets the pipeline here.

        Args:
            captured: the forward.
            inputs: its arguments by name.
            units: samples of each of the smallest micro-batches.
            is_trained: whether a backward may follow.
            chunks: which part of one graph every micro-batch is, where they are that.
            fills: whether the histories of one graph are filled.
        """
        run = self._run
        needs = frozenset(n for n, t in inputs.items() if is_trained and t.requires_grad)
        boundary = CallBoundary.of(
            captured, inputs, run.built.call_sizes(units, is_trained=is_trained), needs
        )
        message = Forward(
            self._num_calls if is_trained else None,
            units,
            captured.module.training,
            needs,
            Autocast.current(run.device),
            chunks,
            fills,
            self._ahead.come(inputs, units, needs) if is_trained else None,
        )
        return message, boundary

    def _led(
        self, message: Forward, boundary: CallBoundary, inputs: Mapping[str, Tensor]
    ) -> Values:
        """Runs a call on all ranks; its outputs by name."""
        run = self._run
        run.lead(message)
        assert run.model is not None
        if message.call is None:
            run.model.forward(message, boundary)
            return boundary.take_outputs()
        self._num_calls += 1
        call = run.model.call(message, boundary)
        self._ahead.follow(call)
        anchor = torch.empty((), device=run.device, requires_grad=True)
        led = LedCall(run, message.call, call, boundary, tuple(inputs), anchor)
        found = _Node.apply(led, *inputs.values(), led.anchor)  # type: ignore[no-untyped-call]
        values: Values = led.structure.unflatten(found)
        return values


def chunk_order(asked: FullGraph, chunks: Chunks, step: int) -> tuple[int, ...]:
    """The order of the chunks in a step, which depends on nothing but the seed and the step."""
    if not asked.techniques.shuffle:
        return tuple(range(len(chunks)))
    seed = torch.initial_seed() if asked.seed is None else asked.seed
    generator = torch.Generator().manual_seed((seed + step) % 2**63)
    return tuple(torch.randperm(len(chunks), generator=generator).tolist())


@dataclass(eq=False)
class LedCall:
    """A differentiable call on rank 0 that runs on all ranks: a node of the user's autograd graph.

    So whatever the user makes of the outputs is differentiated by autograd as on one device.

    Attributes:
        run: of this rank.
        number: of the call.
        call: this rank's part of it.
        boundary: arguments and outputs.
        names: of the arguments, in the order in which autograd has them.
        anchor: stands for the parameters in the user's autograd graph, on their device: whoever
            runs a backward waits for the streams of what its leaves are on.
        outputs: names of the outputs, with how many tensors each has.
        structure: of the outputs.
        is_over: whether nothing can go backward through it any more.
    """

    run: PipelinedRun
    number: int
    call: RankCall
    boundary: CallBoundary
    names: tuple[str, ...]
    anchor: Tensor
    outputs: dict[str, int] = field(default_factory=dict)
    structure: Structure = LEAF
    is_over: bool = False

    def __del__(self) -> None:
        if not self.is_over:  # autograd has let go of it
            self.run.dropped.append(self.number)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Runs the backward half; the gradients of the arguments.

        Raises:
            RuntimeError: second derivatives were asked for, or the forward is gone.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True asks for second derivatives, which a pipelined forward does not "
                "have: its backward runs on other ranks. Compute a gradient penalty on a module "
                "that is not pipelined, or train it on one device."
            )
        if self.is_over:
            raise RuntimeError(
                "backward went through one call of the pipelined forward a second time, but its "
                "activations are freed; keep them with backward(retain_graph=True) the first time"
            )
        run, boundary, given = self.run, self.boundary, iter(gradients)
        boundary.put_gradients({n: list(islice(given, count)) for n, count in self.outputs.items()})
        retain, hands_out = keeps_graph(), will_reach(self.anchor)
        self.is_over, start_s = not retain, time.monotonic()
        with run.failures.guard():
            run.lead(Backward(self.number, retain, hands_out))
            run.own_gradients.look()
            self.call.backward(retain=retain, hands_out=hands_out)
            run.own_gradients.note()
        run.in_pipeline_s += time.monotonic() - start_s
        return [
            boundary.take_input_gradients(name) if boundary.pieces[0][name].requires_grad else None
            for name in self.names
        ]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, led: LedCall, *inputs: Tensor) -> tuple[Any, ...]:
        ctx.led = led
        ctx.set_materialize_grads(False)
        led.call.forward()
        first = led.boundary.outputs[0]
        flags = [tensor.requires_grad for tensor in tensors_in(list(first.values()))]
        with torch.no_grad():
            values = led.boundary.take_outputs()
        leaves, led.structure = flatten(values)
        led.outputs = {name: len(tensors_in([value])) for name, value in values.items()}
        ctx.are_tensors = [isinstance(leaf, Tensor) for leaf in leaves]
        leaves = [each.detach() if isinstance(each, Tensor) else each for each in leaves]
        tensors = compress(leaves, ctx.are_tensors)
        ctx.mark_non_differentiable(*[t for t, flag in zip(tensors, flags) if not flag])
        return tuple(leaves)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.led.backward([*compress(gradients, ctx.are_tensors)]), None)


def led_backward(loss: Tensor, run: PipelinedRun) -> Tensor:
    """The same loss, whose backward the other ranks, if there are any, follow to its end."""
    if run.is_alone or not loss.requires_grad:
        return loss

    def end() -> None:
        run.interrupt.hold()
        run.lead(BackwardEnd())

    led = loss.clone()
    led.register_hook(lambda _: when_backward_ends(end))  # type: ignore[no-untyped-call]
    return led
