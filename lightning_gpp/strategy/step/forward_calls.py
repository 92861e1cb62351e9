"""Rank 0: what stands in for the pipelined forward while the user's step runs.

A call cuts its *arguments* into micro-batches, runs them through the stages of all ranks and
returns the joined outputs; see :mod:`lightning_gpp.strategy.step.pipelined_call` for its backward.

Cutting is right only for a forward that treats every sample by itself. Whether it does is found
out, not assumed: before the first call in each mode, and again where samples differ in a new way,
the forward alone runs on a few of its samples, in one piece and cut. All other forwards (in-batch
similarities, a loss computed in forward) run through the stages in one piece, which is always right
and only less concurrent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.capture import CapturedModel
from lightning_gpp.common.instance_attribute import taken_away
from lightning_gpp.gnn import ChunkedModel
from lightning_gpp.runtime.stage_run import StageCall, run_forward
from lightning_gpp.strategy.cutting.cutting import Values, call_size, input_slices
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.planning.example import example_of
from lightning_gpp.strategy.ranks.messages import Autocast, Backward, Build, Forward
from lightning_gpp.strategy.state.held_elsewhere import lifted
from lightning_gpp.strategy.step.chunk_calls import (
    back_in_place,
    check_size,
    chunk_order,
    in_order,
    sizes_in_order,
)
from lightning_gpp.strategy.step.counted_entries import CountedEntries
from lightning_gpp.strategy.step.open_call import OpenCall
from lightning_gpp.strategy.step.pipelined_call import CallBoundary, PipelinedCall
from lightning_gpp.strategy.step.trials import find_out, holds_for


class BeginAnewError(BaseException):
    """Raised through the user's step, which then runs for every micro-batch, from its beginning."""


class ForwardCalls:
    """Stands in for the pipelined forward on rank 0.

    Args:
        run: whose pipeline runs it.

    Attributes:
        inner: a forward that the user had put on the module itself; None where there is none.
        before: called before each call.
    """

    def __init__(self, run: PipelinedRun) -> None:
        self._run = run
        self._is_separable: dict[tuple[bool, ...], bool] = {}
        self._kinds: dict[tuple[bool, ...], CountedEntries] = defaultdict(CountedEntries)
        self._first: dict[tuple[bool, ...], list[Tensor]] = {}
        self._said: set[str] = set()
        self._num_calls = 0
        self.inner: Any = None
        self.before: Callable[[], None] = lambda: None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What forward returns."""
        run = self._run
        self.before()
        with lifted():
            if run.pipeline is None:
                self._build(args, kwargs)
            captured = run.built.captured
            captured.check_reads()
            with run.clock.pipeline():
                return captured.output(self._values(captured, captured.inputs(args, kwargs)))

    def _build(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Builds the pipeline, on all ranks; this call is the example."""
        run = self._run
        run.stop_early_modules()
        target = run.target
        autocast = Autocast.current(run.device)
        with (
            taken_away(target, "forward", self.inner),
            run.control.together(),
            autocast.while_building(run.device),
        ):
            example = example_of(target, args, kwargs, run.unit_sizes)
            run.lead(Build(autocast))
            run.build(example)
        run.leader_state.look_again()
        if run.steps_per_microbatch and run.control.alone_in == "training_step":
            raise BeginAnewError

    def _values(self, captured: CapturedModel, inputs: Mapping[str, Tensor]) -> Values:
        is_trained = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        chunked = self._run.built.chunked
        if chunked is not None:
            check_size(captured, inputs, chunked.chunks)
            if is_trained and captured.module.training:
                return self._in_chunks(captured, chunked, inputs)
        units = self._units(captured, inputs, is_trained)
        only = self._run.only_stage(units)
        if only is not None:
            call = StageCall(training=captured.module.training)
            flight = run_forward(only, inputs, call, has_backward=is_trained)
            return flight.inputs | flight.outputs
        if is_trained:
            return self._differentiable(captured, inputs, units)
        sizes = self._run.built.call_sizes(units, is_trained=False)
        boundary = CallBoundary.of(captured, inputs, sizes)
        message = self._forward(captured, None, units, frozenset())
        self._run.lead(message)
        self._run.run_forward(message, boundary)
        return boundary.take_outputs()

    def _units(
        self, captured: CapturedModel, inputs: Mapping[str, Tensor], is_trained: bool
    ) -> list[int]:
        """Samples of each of the smallest micro-batches; one where the call cannot be cut."""
        run = self._run
        num_samples = call_size(captured, inputs)
        if num_samples is None:
            return [1]
        if run.built.chunked is not None:  # one graph in one piece
            return [num_samples]
        if is_trained:
            run.full_batch = max(run.full_batch, num_samples)
        units = run.unit_sizes(num_samples, is_training=is_trained)
        if input_slices(captured, inputs, units) is None:
            return [num_samples]
        is_open = len(units) > 1 and not run.is_shape_only
        if is_open and not self._can_cut(captured, inputs, units, is_trained=is_trained):
            units = [num_samples]
        if captured.module.training:
            run.show_state(len(units))
        return units

    def _can_cut(
        self,
        captured: CapturedModel,
        inputs: Mapping[str, Tensor],
        units: list[int],
        *,
        is_trained: bool,
    ) -> bool:
        """Whether a call can be cut; tried again where samples differ in what did not before.

        From each other, or from those of the first call. That is told from whole numbers and flags
        (lengths, masks, numbers of tokens): orders and choices of samples are made of them.
        """
        run = self._run
        key = holds_for(run, units, is_trained=is_trained)
        if self._is_separable.get(key, True):
            numbers = [
                tensor.detach().reshape(len(tensor), -1)
                for tensor in inputs.values()
                if not tensor.is_floating_point() and tensor.dim() and len(tensor) == sum(units)
            ]
            first = self._first.setdefault(key, numbers)
            both = [torch.cat([_as_wide(a, b), b]) for a, b in zip(first, numbers, strict=False)]
            num_first = len(first[0]) if first else 0
            is_new = bool(both) and bool(self._kinds[key].new_pairs(both, [num_first, *units]))
            if is_new or key not in self._is_separable:
                self._is_separable[key] = find_out(
                    run, inputs, units, is_trained=is_trained, said=self._said
                )
        return self._is_separable[key]

    def _in_chunks(
        self, captured: CapturedModel, chunked: ChunkedModel, inputs: Mapping[str, Tensor]
    ) -> Values:
        """One epoch of one graph."""
        run, asked = self._run, self._run.settings.full_graph
        assert asked is not None
        if asked.begins_exact and not self._num_calls:
            units = [chunked.chunks.num_vertices]
            fill = replace(self._forward(captured, None, units, frozenset()), fills=True)
            run.lead(fill)
            run.run_forward(fill, CallBoundary.of(captured, inputs, units))
        order = chunk_order(asked, chunked.chunks, run.module.global_step)
        rows = chunked.chunks.order_of(order)
        ordered = in_order(captured, inputs, rows)
        sizes = sizes_in_order(chunked, order)
        values = self._differentiable(captured, ordered, sizes, order)
        return back_in_place(captured, values, rows)

    def _forward(
        self, captured: CapturedModel, call: int | None, units: list[int], needs: frozenset[str]
    ) -> Forward:
        autocast = Autocast.current(self._run.device)
        return Forward(call, units, captured.module.training, needs, autocast)

    def _differentiable(
        self,
        captured: CapturedModel,
        inputs: Mapping[str, Tensor],
        units: list[int],
        chunks: tuple[int, ...] = (),
    ) -> Values:
        needs = frozenset(name for name, tensor in inputs.items() if tensor.requires_grad)
        sizes = self._run.built.step_sizes(units)
        boundary = CallBoundary.of(captured, inputs, sizes, needs)
        message = replace(self._forward(captured, self._num_calls, units, needs), chunks=chunks)
        return self._led(message, boundary, inputs)

    def _led(
        self, message: Forward, boundary: CallBoundary, inputs: Mapping[str, Tensor]
    ) -> Values:
        """Runs a call that backwards may follow, on all ranks; its outputs by name."""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        self._run.lead(message)
        call = LedCall(self._run, number, self._run.open_call(message, boundary))
        return PipelinedCall(boundary, tuple(inputs), call.forward, call.backward)(inputs)


def _as_wide(rows: Tensor, others: Tensor) -> Tensor:
    """Rows with as many entries as others have."""
    return nn.functional.pad(rows, (0, others.shape[1] - rows.shape[1]))


class LedCall:
    """A differentiable call, whose parts run on all ranks.

    Args:
        run: of this rank.
        number: of the call.
        call: this rank's part of it.
    """

    def __init__(self, run: PipelinedRun, number: int, call: OpenCall) -> None:
        self._run, self._number, self._call, self._dropped = run, number, call, run.dropped
        self._is_over = False

    def __del__(self) -> None:
        if not self._is_over:  # autograd has let go of it
            self._dropped.append(self._number)

    def forward(self) -> None:
        """Runs the forward half."""
        self._call.forward()

    def backward(self, retain: bool, hands_out: bool) -> None:
        """Runs the backward half, on all ranks."""
        if self._is_over:
            raise RuntimeError(
                "backward went through one call of the pipelined forward a second time, but its "
                "activations are freed; keep them with backward(retain_graph=True) the first time"
            )
        self._is_over = not retain
        with self._run.failures.guard(), self._run.clock.pipeline():
            self._run.lead(Backward(self._number, retain, hands_out))
            self._run.own_gradients.look()
            self._call.backward(retain=retain, hands_out=hands_out)
            self._run.own_gradients.note()
