"""Runs a module, and graphs of it, without leaving a trace.

The module itself runs once beside its traces: in train mode, with inputs of another size than it is
traced with. What a graph of it computes with these is compared, gradients included: the operators
of a graph are the same for all samples, autograd derives the backward from them, and a detached or
doubled path shows at any size. Both modes have the same graph, or only one is captured; only
where constants other than flags differ the module runs in evaluation mode, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_gpp.capture.checks.backwards import (
    Backwards,
    add_up,
    gradients_of,
    hooked,
    watched_backwards,
    weighted_sum,
)
from lightning_gpp.capture.checks.check import (
    Result,
    ValuesDifferError,
    compare,
    unchanged_parameters,
)
from lightning_gpp.capture.checks.observers import watched_hooks
from lightning_gpp.capture.checks.rollback import (
    Changes,
    ModuleState,
    random_state,
    rollback,
    seed_all,
    set_training,
    steady_names,
)
from lightning_gpp.capture.errors import CaptureError, GuardError, describe
from lightning_gpp.capture.operators.fingerprint import constant_text
from lightning_gpp.capture.operators.observe import Observation, Observer, observe
from lightning_gpp.capture.tracing.reads import Read, watched_reads
from lightning_gpp.capture.tracing.trace import Trace
from lightning_gpp.capture.values.arguments import Arguments, withhold
from lightning_gpp.capture.values.placed import HostWeights
from lightning_gpp.capture.values.samples import (
    Sample,
    first_sample,
    other_content,
    other_samples,
)
from lightning_gpp.capture.values.structure import leaves_of, map_tensors

_logger = logging.getLogger(__name__)

MODES = (True, False)
"""Training flags."""

SEED = 20240521  # another than while tracing: numbers drawn then must not be frozen unnoticed

_Loss = Callable[[Any], Tensor | None]
_Seen = Mapping[fx.Node, Observation]


class Rehearsal:
    """Results of a module, and of graphs of it.

    Args:
        module: whose forward.
        args: of it, as examples.
        kwargs: likewise, by name.
        train_modes: training flag in train mode per qualified name; by default as they are.

    Attributes:
        arguments: how they are laid out.
        sample: the given inputs, with which it is traced.
        weights: how the module's weights come to the device of the inputs.
        other: inputs with which the module runs, from :meth:`begin` on.
        own: what it returns and changes in train mode with these; likewise.
        reads: plain attributes that forward reads; likewise.
        backwards: what it did that a backward goes through; likewise.
        withheld: outputs of forward that are not handed out; likewise.
        trace_seed: with which its first trace gets its values.

    Raises:
        CaptureError: there are no samples.
    """

    other: Sample
    own: Result
    reads: list[Read]
    backwards: Backwards
    withheld: list[str]

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        train_modes: Mapping[str, bool] | None,
    ) -> None:
        self.module, self.arguments = module, Arguments.of(module, args, kwargs)
        names = {name: part.training for name, part in module.named_modules()}
        if train_modes is None:  # those of now, if it is not in evaluation mode
            train_modes = names if module.training else {}
        training = {name: train_modes.get(name, True) for name in names}
        self._flags = {True: training, False: dict.fromkeys(names, False)}
        self._later: Any = None
        self._loss: _Loss | None = weighted_sum
        self._needs_backward = True
        self.trace_seed = 0
        self.sample = first_sample(self.arguments.tensors(args, kwargs))
        if not self.sample.num_samples:
            raise CaptureError(
                "the first batch has no samples, so the model cannot be captured from it: "
                "begin with another batch. Later ones may be empty"
            )
        self.weights = HostWeights(module, self.sample.device)

    def take_samples(self, count: int) -> None:
        """The first samples take the place of the given ones."""
        if count != self.sample.num_samples:
            self.sample = self.sample.sized(count)

    def take_mode(self, training: bool) -> None:
        """Runs with the training flags of this mode from now on, in place of both modes."""
        self._flags = dict.fromkeys(MODES, self._flags[training])
        self._needs_backward = training

    @contextmanager
    def in_mode(self, training: bool, seed: int = 0) -> Iterator[ModuleState]:
        """The module in a mode, whatever it does there taken back."""
        with rollback(self.module) as state:
            set_training(self.module, self._flags[training])
            seed_all(seed)
            yield state

    # The module itself --------------------------------------------------------------------------

    def begin(self) -> None:
        """Runs the module with inputs of another size, or with the given ones; raises what it does.

        It need not take every size.
        """
        self._candidates = iter((*other_samples(self.sample), self.sample))
        try:
            self._go_on()
        except Exception:  # a forward that takes gradients may keep no graph in evaluation
            if self._needs_backward or self._loss is None:
                raise
            self._loss = None
            self.begin()

    def _go_on(self) -> None:
        for other in self._candidates:
            self.other = other
            try:
                with (
                    watched_reads(self.module) as self.reads,
                    watched_backwards(self.module) as self.backwards,
                    watched_hooks(self.module),
                ):
                    self.own = self._run(
                        self._forward, self.other, True, self._loss, self._run_later
                    )
                return
            except Exception as error:  # of the user's code
                if self.other is self.sample or isinstance(error, CaptureError):
                    raise
                num_samples = self.other.num_samples
                _logger.info("the model does not run on %d samples: %s", num_samples, error)

    def runs_on_given(self) -> bool:
        """Whether the module runs with the given inputs; else one sample comes twice from now on.

        Raises what the module does where there are more.
        """
        try:
            for mode in MODES:
                self._run(self._forward, self.sample, mode)
        except Exception:  # of the user's code, which may normalize batches of several
            if self.sample.num_samples > 1 or self.sample.graphs is not None:
                raise
            self.take_samples(2)
            return False
        return True

    def _forward(self, tensors: Mapping[str, Tensor]) -> Any:
        args, kwargs = self.arguments.rebuild(tensors)
        output, self.withheld = withhold(self.module.forward(*args, **kwargs))
        return output

    def _run_later(self, state: ModuleState, changes: Changes) -> None:
        """Calls forward once more, with the given inputs, if it left anything in attributes.

        A layer may keep its only graph. Of one or two samples the others may be repetitions.
        """
        sample = self.other if self.sample.graphs else self.sample
        if not changes.attributes or sample.device.type == "meta":
            return
        with self.weights.visiting():
            if self.sample.num_samples <= 2 and not self.sample.graphs:
                with suppress(Exception):  # it need not take every size
                    self._forward(other_content(sample).fresh())
            state.restore_buffers()
            seed_all(SEED if sample.graphs else self.trace_seed)
            try:
                self._later = map_tensors(self._forward(sample.fresh()), Tensor.detach)
            except Exception as error:  # of the user's code
                self._later = error

    def check_memory(self, traced: Any) -> None:
        """Checks that forward does not compute with what an earlier call left in attributes.

        Args:
            traced: the output of a first call with the given inputs.

        Raises:
            CaptureError: it does; a pipelined forward runs elsewhere, once for every micro-batch.
        """
        later, first = self._later, self.own.output if self.sample.graphs else traced
        try:
            if isinstance(later, Exception):
                raise later
            if later is not None:
                compare(Result(first, {}), Result(later, {}), "a second call")
        except Exception as error:  # of the user's code as well, by what is left
            if isinstance(error, ValuesDifferError) and self._is_noise(error, self.own, True):
                return
            raise CaptureError(
                "forward computes with what an earlier call left in "
                f"{', '.join(self.own.changes.attributes)}. A pipelined forward runs in other "
                "processes, once per micro-batch, and would find another value. Pass the value as "
                "an argument and return the new one, or make it a buffer (register_buffer)"
            ) from None

    # Graphs of it -------------------------------------------------------------------------------

    def replayed(
        self,
        trace: Trace,
        sample: Sample,
        training: bool,
        loss: _Loss | None = None,
        observer: Observer | None = None,
    ) -> tuple[Result, dict[fx.Node, Observation]]:
        """Result of a trace and observations of its nodes; nodes observed before do not run."""
        seen: dict[fx.Node, Observation] = {}
        observer = observer or Observer(self.module)

        def forward(tensors: Mapping[str, Tensor]) -> Any:
            seen.update(observe(trace.graph, tensors, observer))
            return observer.output(trace)

        return self._run(forward, sample, training, loss), seen

    def check(self, traces: Mapping[bool, Trace]) -> _Seen:
        """Compares a graph with the module; returns what its nodes do in train mode.

        Raises:
            CaptureError: they are not the same.
            GuardError: a sub-module decides by the number of samples.
        """
        while True:
            try:
                seen = self._compared(traces[True], self.own, training=True)
                break
            except GuardError as error:
                if error.scope or self.other is self.sample:  # a sub-module can be kept whole
                    raise
                _logger.warning(
                    "the model was captured with %d samples only, because its forward takes "
                    "another path with %d: %s",
                    *(self.sample.num_samples, self.other.num_samples, describe(error)),
                )
                self._go_on()
        if _differ_in_constants(*traces.values()):
            own = self._run(self._forward, self.other, False)
            self._compared(traces[False], own, training=False)
        return seen

    def _compared(self, trace: Trace, own: Result, *, training: bool) -> _Seen:
        """Compares; what the nodes do."""
        what = f"{'train' if training else 'eval'} mode, {self.other.num_samples} samples"
        got, seen = self.replayed(trace, self.other, training, self._loss if training else None)
        try:
            compare(own, got, what)
        except ValuesDifferError as error:
            if not self._is_noise(error, own, training):
                raise
        return seen

    def _is_noise(self, error: ValuesDifferError, own: Result, training: bool) -> bool:
        """Whether the device differs from run to run by more than rounding itself.

        Kernels add up in any order, in half precision (backwards of fused attention).
        """
        if error.is_large or self.other.device.type == "cpu":
            return False
        loss = self._loss if training else None
        try:
            compare(own, self._run(self._forward, self.other, training, loss), "a second run")
        except ValuesDifferError:
            return True
        return False

    def steady(self, trace: Trace, changing: frozenset[str]) -> frozenset[str]:
        """The buffers, of those that change, that change alike whatever forward is called with."""
        if not changing:
            return changing
        try:
            other, _ = self.replayed(trace, other_content(self.sample), True)
        except Exception:  # the model itself may not take this size
            return frozenset()
        return steady_names(self.module, changing, self.own.buffers, other.buffers)

    def meets_in_backward(self, trace: Trace) -> str | None:
        """Where the backward mixes gradients of samples that forward keeps apart; None if nowhere.

        Args:
            trace: in evaluation mode, where nothing is drawn.
        """
        if (hook := self.backwards.hook or hooked(self.module)) is not None:
            return hook
        function, sample = self.backwards.function, self.sample
        if function is None:
            return None

        def gradients(rows: Tensor) -> dict[str, Tensor]:
            loss = partial(weighted_sum, rows=rows, num=sample.num_samples)
            result, _ = self.replayed(trace, sample.of(rows), False, loss)
            names = {name for name, _ in self.module.named_parameters()}
            found = result.gradients.items()
            return {name: each for name, each in found if each is not None and name in names}

        if sample.graphs is None and sample.num_samples > 1:
            try:
                is_apart = add_up(sample.num_samples, gradients)
            except Exception:  # of the user's code
                is_apart = False
            if is_apart:
                return None
        return f"gradients of samples may meet in the backward of {function}"

    # Both ---------------------------------------------------------------------------------------

    def _run(
        self,
        forward: Callable[[dict[str, Tensor]], Any],
        sample: Sample,
        training: bool,
        loss: _Loss | None = None,
        then: Callable[[ModuleState, Changes], None] | None = None,
    ) -> Result:
        """Runs a forward, and a backward from a loss of its output if there is one.

        Args:
            forward: from the inputs by name.
            sample: the inputs.
            training: the mode.
            loss: of the output.
            then: called before what forward changed is taken back, if it is the module's own.
        """
        module, weights = self.module, self.weights
        unchanged = nullcontext() if then is None else unchanged_parameters(module)
        with self.in_mode(training, SEED) as state, unchanged:
            inputs = sample.fresh()
            # a view, so that an in-place change is as legal as for an input that some layer made
            views = {name: t.view_as(t) if t.requires_grad else t for name, t in inputs.items()}
            before = random_state(sample.device)
            with weights.visiting(watched=then is not None):
                output = forward(views)
            draws = not torch.equal(before, random_state(sample.device))
            gradients = {} if loss is None else gradients_of(loss(output), module, inputs, weights)
            output = map_tensors(output, Tensor.detach)
            buffers = {name: item.detach().clone() for name, item in module.named_buffers()}
            changes = state.changes()
            if then is not None:
                then(state, changes)
        return Result(output, gradients, buffers, changes, draws)


def _differ_in_constants(train: Trace, evaluation: Trace) -> bool:
    """Whether two traces of one graph have other constants, flags left out."""

    def constants(trace: Trace) -> list[str]:
        leaves = leaves_of([[node.args, node.kwargs] for node in trace.graph.nodes])
        return [constant_text(x) for x in leaves if not isinstance(x, fx.Node | bool)]

    return constants(train) != constants(evaluation)
