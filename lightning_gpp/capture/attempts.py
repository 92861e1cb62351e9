"""The ways to capture a model, tried one after the other; the public entry."""

from __future__ import annotations

import dataclasses
import functools
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from lightning_gpp.capture.blocks import BlockGraph, trace_blocks
from lightning_gpp.capture.checks.check import (
    Result,
    ValuesDifferError,
    compare,
    in_float64,
    reference,
    replay,
    sample_in_float64,
)
from lightning_gpp.capture.checks.rollback import rollback, seeded, training_flags
from lightning_gpp.capture.errors import REMEDY, CaptureError, GuardError, describe
from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.operators.cuts import Cuts
from lightning_gpp.capture.operators.normalize import (
    normalize,
    observation,
    protect_inputs,
    without_guard,
)
from lightning_gpp.capture.operators.observe import observe
from lightning_gpp.capture.steady_state import other_content, steady_names
from lightning_gpp.capture.tracing.concrete_tracer import trace_concretely
from lightning_gpp.capture.tracing.fx_tracer import trace_symbolically
from lightning_gpp.capture.tracing.keep_whole import DrawError, KeepWholeError, line_of_draw
from lightning_gpp.capture.tracing.leaves import LeafPolicy, has_stacks
from lightning_gpp.capture.tracing.library_switches import uncompiled
from lightning_gpp.capture.tracing.modes import check_same_graph, mode_flags
from lightning_gpp.capture.tracing.reads import watched_reads
from lightning_gpp.capture.tracing.trace import Trace, guard
from lightning_gpp.capture.values.arguments import Arguments
from lightning_gpp.capture.values.samples import Sample, few_samples, first_sample, other_samples
from lightning_gpp.capture.values.withheld import withheld_outputs

_logger = logging.getLogger(__name__)

Tracer = Callable[[LeafPolicy], Trace]
E = TypeVar("E", bound=BaseException)
_Other = tuple[Sample, dict[bool, Result]]
"""Another input, and what the module itself computes on it in each mode."""


def capture(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    leaf_modules: Sequence[type | str] = (),
    blocks: BlockGraph | None = None,
    train_modes: Mapping[str, bool] | None = None,
) -> CapturedModel:
    """Captures ``module.forward(*args, **kwargs)`` as a graph of operators.

    Tried in this order: the ``blocks`` that the user gives (then nothing else), ``torch.fx``, the
    concrete tracer. Each result is checked against the module: outputs and gradients, in train
    and in eval mode, on the given input and on one of another size. The module is left as it was,
    random generators included.

    Tensors on the ``meta`` device have no values: then only shapes and types are compared, and
    which buffers change is not known; the log says so (level info).

    Args:
        module: any module; nothing in it is replaced.
        args: one micro-batch, as forward gets it. Call it under the autocast that training uses.
        kwargs: its keyword arguments.
        leaf_modules: types or qualified names of modules to keep whole.
        blocks: the graph by hand.
        train_modes: training flag in train mode per qualified name; by default as they are.

    Raises:
        CaptureError: it cannot be captured; each attempt is listed with its reason and line. Or
            the micro-batch has no samples.
    """
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise CaptureError("lazy parameters have no size yet: run the module once before training")
    with (
        uncompiled(),
        rollback(module),
        torch.inference_mode(False),
        torch.enable_grad(),
        closing(_Session(module, args, kwargs or {}, train_modes)) as session,
    ):
        if any(tensor.is_meta for tensor in session.sample.tensors.values()):
            _logger.info(
                "captured with shapes only: that the graph computes what the module computes was "
                "checked for shapes and types, not for values, and which buffers change is not "
                "known"
            )
        captured = session.first_success(leaf_modules, blocks)
        captured.steady = session.steady_state(captured)
        changed = _outside_of_leaves(captured, session.expected[True].changed)
        kept = _outside_of_leaves(captured, session.expected[True].kept)
        if kept:
            raise CaptureError(
                f"forward keeps {', '.join(kept)}, a result that gradients flow through, as an "
                "attribute; a pipelined forward runs elsewhere and cannot leave it behind. Return "
                "it from forward instead"
            )
        if withheld := withheld_outputs(session.expected[True].output):
            _logger.warning(
                "not handed out by the pipelined forward, an error if read: %s. Keys and values "
                "that transformers keep for generation are not for training: "
                "config.use_cache=False saves their time and memory",
                ", ".join(f"{item.path} ({item.kind})" for item in withheld),
            )
        captured.reads = tuple(
            read
            for read in session.reads
            if not _is_inside(captured, read.path)
            and ".".join(filter(None, (read.path, read.name))) not in changed
        )
        if changed:
            _logger.warning(
                "forward changes %s, which are neither parameters nor buffers: a pipelined forward "
                "does not make these changes",
                ", ".join(changed),
            )
    return captured


def _is_inside(captured: CapturedModel, path: str) -> bool:
    """Whether a module is a leaf module or in one."""
    return any(f"{path}.".startswith(f"{leaf}.") for leaf in captured.leaf_modules)


def _outside_of_leaves(captured: CapturedModel, attributes: Sequence[str]) -> list[str]:
    """The changed attributes that no leaf module changes by itself when a stage runs it."""
    leaves = tuple(f"{target}." for target in captured.leaf_modules)
    return [name for name in attributes if not name.startswith(leaves)]


class _Session:
    """One module, its example inputs and what it computes on them."""

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        train_modes: Mapping[str, bool] | None,
    ) -> None:
        self.module = module
        self.arguments = Arguments.of(module, args, kwargs)
        self.sample = first_sample(self.arguments.tensors(args, kwargs))
        if not self.sample.num_samples:
            raise CaptureError(
                "the first batch has no samples, which do not show how the model goes with them: "
                "begin with another batch. Later ones may be empty"
            )
        self.flags = mode_flags(module, train_modes)
        with watched_reads(module) as reads:
            expected = self._reference(self.sample, True)
        self.reads = reads
        self.expected = {True: expected, False: self._reference(self.sample, False)}
        self.without_gradients = self._reference_without_gradients()
        self.others = list(other_samples(self.sample))
        self._found: dict[int, _Other | None] = {}

    def close(self) -> None:
        """Forgets all values: errors that were kept on the way refer to it from their frames."""
        vars(self).clear()

    @functools.cached_property
    def across(self) -> _Other | None:
        """One sample instead of several, or two instead of one."""
        return self._other_reference(few_samples(self.sample, 1 + (self.sample.num_samples == 1)))

    def first_success(
        self, leaf_modules: Sequence[type | str], blocks: BlockGraph | None
    ) -> CapturedModel:
        """The first attempt that computes what the module computes.

        Attempts that need a module to stay whole come after those that do not.
        """
        failures: list[tuple[str, Exception]] = []
        undecided = []
        for method, policy, tracer in self._attempts(leaf_modules, blocks):
            try:
                return self._captured(method, policy, tracer)
            except KeepWholeError as decision:
                undecided.append((method, policy, tracer, _without_values(decision)))
            except Exception as error:  # user code under a tracer may raise anything
                _logger.debug("capture by %s failed", method, exc_info=True)
                failures.append((method, _without_values(error)))
        for method, policy, tracer, reason in undecided:
            try:
                return self._keeping_whole(method, policy, tracer, reason)
            except Exception as error:  # likewise
                failures.append((method, _without_values(error)))
        raise CaptureError(
            f"{type(self.module).__name__}.forward cannot be captured:\n{_reasons(failures)}\n"
            f"{REMEDY}"
        ) from failures[-1][1]

    def steady_state(self, captured: CapturedModel) -> frozenset[str]:
        """The buffers that forward changes in training mode, whatever it is called with."""
        changing = captured.changing
        other = self._other_reference(other_content(self.sample)) if changing else None
        if other is None:
            return frozenset()
        _, results = other
        return steady_names(
            self.module, changing, self.expected[True].buffers, results[True].buffers
        )

    def _attempts(
        self, leaf_modules: Sequence[type | str], blocks: BlockGraph | None
    ) -> Iterator[tuple[str, LeafPolicy, Tracer]]:
        open_policy = LeafPolicy.of(self.module, leaf_modules)
        if blocks is not None:
            yield "blocks", open_policy, lambda _: trace_blocks(self.module, self.arguments, blocks)
            return
        policies = [open_policy]
        if has_stacks(self.module):
            policies.append(dataclasses.replace(open_policy, open_stacks=False))
        for policy in policies:
            yield "torch.fx", policy, self._symbolically
            yield "concrete", policy, self._concretely

    def _symbolically(self, policy: LeafPolicy) -> Trace:
        return trace_symbolically(self.module, self.arguments, policy)

    def _concretely(self, policy: LeafPolicy) -> Trace:
        return trace_concretely(self.module, self.arguments, policy, self.sample.fresh())

    def _keeping_whole(
        self, method: str, policy: LeafPolicy, tracer: Tracer, decision: KeepWholeError
    ) -> CapturedModel:
        """Modules whose own Python decides what they compute become leaves, one by one."""
        reasons: dict[str, KeepWholeError] = {}
        while True:
            policy = self._with_leaf(policy, decision)
            line = f"{policy.types[-1].__name__} stays whole: {describe(decision)}"
            reasons[line] = decision
            try:
                captured = self._captured(method, policy, tracer)
            except KeepWholeError as another:
                decision = _without_values(another)
            else:
                captured.kept_whole = tuple(reasons)
                by_data = (line for line, reason in reasons.items() if reason.on_data)
                captured.decision = next(by_data, None)
                return captured

    def _with_leaf(self, policy: LeafPolicy, decision: KeepWholeError) -> LeafPolicy:
        kind = type(self.module.get_submodule(decision.scope))
        if not decision.scope or kind in policy.types or kind is type(self.module):
            if isinstance(decision, DrawError):
                raise self._draw_error(decision.scope) from None
            raise decision
        return dataclasses.replace(policy, types=(*policy.types, kind))

    def _draw_error(self, scope: str) -> CaptureError:
        args, kwargs = self.arguments.rebuild(self.sample.fresh())
        with self._in_mode(True):
            line = line_of_draw(lambda: self.module.forward(*args, **kwargs))
        return CaptureError(
            f"{line} draws a random number outside of torch (random, numpy), which would be frozen "
            f"into the graph: draw it with torch.rand(...) and compute with the tensor: {REMEDY}"
        )

    def _captured(self, method: str, policy: LeafPolicy, tracer: Tracer) -> CapturedModel:
        traces = {mode: self._trace(policy, tracer, mode) for mode in (True, False)}
        check_same_graph(traces[True], traces[False])
        try:
            return self._checked(method, traces)
        except GuardError as error:
            raise KeepWholeError(str(error), _scope_of(error, traces[True])) from error

    def _checked(self, method: str, traces: dict[bool, Trace]) -> CapturedModel:
        traces, second = self._fitting(method, traces)
        captured = self._model(method, traces, second[0] if second else None)
        for mode in (True, False):
            self._check(captured, self.sample, self.expected[mode], mode)
            if second:
                self._check(captured, second[0], second[1][mode], mode)
        if self.without_gradients is not None:
            with torch.no_grad():
                self._check(captured, self.sample, self.without_gradients, False)
        return captured

    def _model(
        self, method: str, traces: dict[bool, Trace], second: Sample | None
    ) -> CapturedModel:
        captured = CapturedModel(
            self.module,
            self.arguments,
            traces,
            self._cuts(traces[True], second),
            method,
            next(iter(self.sample.tensors.values())).device,
        )
        captured.takes_graphs = self.sample.graphs is not None
        return captured

    def _trace(self, policy: LeafPolicy, tracer: Tracer, mode: bool) -> Trace:
        with self._in_mode(mode):
            trace = tracer(policy)
        observations = self._observe(trace, self.sample, mode)
        if protect_inputs(trace, observations):
            observations = self._observe(trace, self.sample, mode)
        return normalize(trace, observations)

    def _observe(self, trace: Trace, sample: Sample, mode: bool) -> dict[fx.Node, Any]:
        with self._in_mode(mode):
            return observe(trace.graph, self.module, sample.fresh())

    @contextmanager
    def _in_mode(self, mode: bool) -> Iterator[None]:
        with rollback(self.module), training_flags(self.module, self.flags[mode]), seeded(0):
            yield

    def _reference(self, sample: Sample, mode: bool) -> Result:
        return reference(self.module, self.arguments, sample, self.flags[mode])

    def _reference_without_gradients(self) -> Result | None:
        try:
            with torch.no_grad():
                return self._reference(self.sample, False)
        except Exception as error:  # the model itself may need gradients
            _logger.info("the model does not run without gradients: %s", error)
            return None

    def _other_reference(self, sample: Sample) -> _Other | None:
        try:
            return sample, {mode: self._reference(sample, mode) for mode in (True, False)}
        except Exception as error:  # the model itself may not take this size
            _logger.info("the model does not run on %d samples: %s", sample.num_samples, error)
            return None

    def _fitting(
        self, method: str, traces: dict[bool, Trace]
    ) -> tuple[dict[bool, Trace], _Other | None]:
        """The traces without idle decisions, and a second input whose size the others allow.

        Raises:
            GuardError: a sub-module decides by the number of samples.
        """
        try:
            traces = self._without_idle_decisions(method, traces)
        except GuardError as error:
            self._accept(error, traces[True], 1)
        for number, sample in enumerate(self.others):
            if number not in self._found:
                self._found[number] = self._other_reference(sample)
            second = self._found[number]
            if second is None:
                continue
            failed = self._failing_guard(traces[True], second[0])
            if failed is None:
                return traces, second
            self._accept(failed, traces[True], second[0].num_samples)
        return traces, None

    def _accept(self, error: GuardError, trace: Trace, num_samples: int) -> None:
        """Warns of a decision of the captured module; one of a sub-module can be kept whole."""
        if _scope_of(error, trace):
            raise error
        _logger.warning(
            "captured with micro-batches of %d samples; with %d it would raise: %s",
            self.sample.num_samples,
            num_samples,
            error,
        )

    def _without_idle_decisions(self, method: str, traces: dict[bool, Trace]) -> dict[bool, Trace]:
        """The traces without decisions between one sample and several that change nothing.

        So is ``if len(x) != 1: x = x.expand(...)``: the graph of either way computes both.

        Raises:
            GuardError: the first of them, where they do change something.
        """
        num_samples = self.sample.num_samples
        other = None if self.sample.graphs is not None else self.across
        first = failed = None if other is None else self._failing_guard(traces[True], other[0])
        if other is None or first is None:
            return traces
        if num_samples > 2 and self._failing_guard(traces[True], few_samples(self.sample, 2)):
            return traces  # it is not about one sample
        try:
            while failed is not None:
                traces = {mode: without_guard(trace, failed.name) for mode, trace in traces.items()}
                failed = self._failing_guard(traces[True], other[0])
            captured = self._model(method, traces, None)
            for mode in (True, False):
                self._check(captured, other[0], other[1][mode], mode)
        except Exception:  # the graph of the other way may do anything
            raise first from None
        return traces

    def _failing_guard(self, trace: Trace, sample: Sample) -> GuardError | None:
        try:
            self._observe(trace, sample, mode=True)
        except GuardError as error:
            return error.with_traceback(None)  # its frames hold all values
        return None

    def _check(self, captured: CapturedModel, sample: Sample, expected: Result, mode: bool) -> None:
        got = replay(captured, sample, self.flags[mode], training=mode)
        what = f"{'train' if mode else 'eval'} mode, {sample.num_samples} samples"
        if not torch.is_grad_enabled():
            what += ", without gradients"
        try:
            compare(expected, got, what)
        except ValuesDifferError as error:
            if error.is_large or not self._agrees_in_float64(captured, sample, mode):
                raise

    def _agrees_in_float64(self, captured: CapturedModel, sample: Sample, mode: bool) -> bool:
        """Whether a difference is rounding: in a higher precision there is none.

        A gradient that large terms cancel into loses most of its digits in float32.
        """
        sample, flags = sample_in_float64(sample), self.flags[mode]
        try:
            with in_float64(self.module):
                expected = reference(self.module, self.arguments, sample, flags)
                compare(expected, replay(captured, sample, flags, training=mode), "in float64")
        except Exception as error:  # it differs, or the model runs in its own precision only
            _logger.info("the captured graph differs, and in float64: %s", error)
            return False
        return True

    def _cuts(self, trace: Trace, second: Sample | None) -> Cuts:
        """How values can be cut, from what they are at two numbers of samples."""
        nodes = [node for node in trace.graph.nodes if node.op != "output"]
        others = self._observe(trace, second, mode=True) if second else None
        seen = {node: observation(node) for node in nodes}
        return Cuts.of(seen, self.sample, others, second)


def _without_values(error: E) -> E:
    """An error that is kept while other ways are tried, without what its frames held.

    A frame and the error that it keeps are a circle: values would stay until Python looks for such.
    """
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__
    return error


def _reasons(failures: Sequence[tuple[str, Exception]]) -> str:
    """A line per reason, with the methods that failed by it."""
    methods: dict[str, list[str]] = {}
    for method, error in failures:
        methods.setdefault(describe(error), []).append(method)
    return "\n".join(
        f"  {', '.join(dict.fromkeys(names))}: {reason}" for reason, names in methods.items()
    )


def _scope_of(error: GuardError, trace: Trace) -> str:
    """The module that took a decision."""
    for node in trace.graph.nodes:
        if node.target is guard and node.args[3] == error.location:
            return str(node.meta["scope"])
    return ""
