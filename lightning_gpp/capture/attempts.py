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
    ValuesDifferError,
    compare,
    in_float64,
    reference,
    replay,
    sample_in_float64,
)
from lightning_gpp.capture.checks.references import MODES, CheckedPass, References
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
from lightning_gpp.capture.operators.observe import Observation, observe
from lightning_gpp.capture.steady_state import other_content, steady_names
from lightning_gpp.capture.tracing.concrete_tracer import trace_concretely
from lightning_gpp.capture.tracing.fx_tracer import trace_symbolically
from lightning_gpp.capture.tracing.keep_whole import DrawError, KeepWholeError, line_of_draw
from lightning_gpp.capture.tracing.leaves import LeafPolicy, has_stacks
from lightning_gpp.capture.tracing.library_switches import uncompiled
from lightning_gpp.capture.tracing.modes import check_same_graph, mode_flags
from lightning_gpp.capture.tracing.trace import Trace, guard
from lightning_gpp.capture.values.arguments import Arguments
from lightning_gpp.capture.values.samples import Sample, few_samples, first_sample
from lightning_gpp.capture.values.withheld import withheld_outputs

_logger = logging.getLogger(__name__)

Tracer = Callable[[LeafPolicy], Trace]
E = TypeVar("E", bound=BaseException)


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
        captured.is_random = session.references.given.draws
        changed = _outside_of_leaves(captured, session.references.given.changed)
        kept = _outside_of_leaves(captured, session.references.given.kept)
        if kept:
            raise CaptureError(
                f"forward keeps {', '.join(kept)}, a result that gradients flow through, as an "
                "attribute; a pipelined forward runs elsewhere and cannot leave it behind. Return "
                "it from forward instead"
            )
        if withheld := withheld_outputs(session.references.given.output):
            _logger.warning(
                "not handed out by the pipelined forward, an error if read: %s. Keys and values "
                "that transformers keep for generation are not for training: "
                "config.use_cache=False saves their time and memory",
                ", ".join(f"{item.path} ({item.kind})" for item in withheld),
            )
        captured.reads = tuple(
            read
            for read in session.references.reads
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
        self.references = References(module, self.arguments, self.sample, self.flags)

    def close(self) -> None:
        """Forgets all values: errors that were kept on the way refer to it from their frames."""
        vars(self).clear()

    @functools.cached_property
    def across(self) -> Sample:
        """One sample instead of several, or two instead of one."""
        return few_samples(self.sample, 1 + (self.sample.num_samples == 1))

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
        if not changing:
            return frozenset()
        try:
            other = self.references.of(CheckedPass(other_content(self.sample), True))
        except Exception as error:  # the model itself may not take this size
            _logger.info("which buffers change alike cannot be told: %s", error)
            return frozenset()
        given = self.references.given.buffers
        return steady_names(self.module, changing, given, other.buffers)

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
        fit = self._fitting(method, traces)
        captured = self._model(method, fit)
        for run in self.references.passes(fit.second, gradients=not fit.has_gradients):
            self._check(captured, run)
        return captured

    def _model(self, method: str, fit: _TraceFit) -> CapturedModel:
        nodes = [node for node in fit.traces[True].graph.nodes if node.op != "output"]
        seen = {node: observation(node) for node in nodes}
        captured = CapturedModel(
            self.module,
            self.arguments,
            fit.traces,
            Cuts.of(seen, self.sample, fit.seen, fit.second),
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

    def _observe(self, trace: Trace, sample: Sample, mode: bool) -> dict[fx.Node, Observation]:
        with self._in_mode(mode):
            return observe(trace.graph, self.module, sample.fresh())

    @contextmanager
    def _in_mode(self, mode: bool) -> Iterator[None]:
        with rollback(self.module), training_flags(self.module, self.flags[mode]), seeded(0):
            yield

    def _fitting(self, method: str, traces: dict[bool, Trace]) -> _TraceFit:
        """The traces without idle decisions, and a second input whose size the others allow.

        Raises:
            GuardError: a sub-module decides by the number of samples.
        """
        fit = _TraceFit(traces)
        try:
            fit = self._without_idle_decisions(method, fit)
        except GuardError as error:
            self._accept(error, traces[True], 1)
        for sample in self.references.others:
            is_smaller = sample.num_samples < self.sample.num_samples
            if not self.references.runs(sample, backward=is_smaller and not fit.has_gradients):
                continue
            seen = self._seen(fit.traces[True], sample)
            if not isinstance(seen, GuardError):
                return dataclasses.replace(fit, second=sample, seen=seen)
            self._accept(seen, fit.traces[True], sample.num_samples)
        return fit

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

    def _without_idle_decisions(self, method: str, fit: _TraceFit) -> _TraceFit:
        """The traces without decisions between one sample and several that change nothing.

        So is ``if len(x) != 1: x = x.expand(...)``: the graph of either way computes both.

        Raises:
            GuardError: the first of them, where they do change something.
        """
        if self.sample.graphs is not None:
            return fit
        traces, across = fit.traces, self.across
        try:
            first = failed = self._failing_guard(traces[True], across)
        except Exception:
            if self.references.runs(across, backward=True):
                raise
            return fit  # the model itself does not take so few
        if first is None or not self.references.runs(across, backward=True):
            return fit
        few = few_samples(self.sample, 2)
        if self.sample.num_samples > 2 and self._failing_guard(traces[True], few):
            return fit  # it is not about one sample
        try:
            while failed is not None:
                traces = {mode: without_guard(trace, failed.name) for mode, trace in traces.items()}
                failed = self._failing_guard(traces[True], across)
            without = _TraceFit(traces, has_gradients=True)
            captured = self._model(method, without)
            for mode in MODES:
                self._check(captured, CheckedPass(across, mode, backward=True))
        except Exception:  # the graph of the other way may do anything
            raise first from None
        return without

    def _failing_guard(self, trace: Trace, sample: Sample) -> GuardError | None:
        seen = self._seen(trace, sample)
        return seen if isinstance(seen, GuardError) else None

    def _seen(self, trace: Trace, sample: Sample) -> dict[fx.Node, Observation] | GuardError:
        """What the nodes do in training with a sample, or the decision that comes out otherwise."""
        try:
            return self._observe(trace, sample, mode=True)
        except GuardError as error:
            return error.with_traceback(None)  # its frames hold all values

    def _check(self, captured: CapturedModel, run: CheckedPass) -> None:
        expected, mode = self.references.of(run), run.training
        with torch.set_grad_enabled(run.is_recorded):
            got = replay(
                captured, run.sample, self.flags[mode], training=mode, backward=run.backward
            )
        try:
            compare(expected, got, str(run))
        except ValuesDifferError as error:
            if error.is_large or not self._agrees_in_float64(captured, run):
                raise

    def _agrees_in_float64(self, captured: CapturedModel, run: CheckedPass) -> bool:
        """Whether a difference is rounding: in a higher precision there is none.

        A gradient that large terms cancel into loses most of its digits in float32.
        """
        sample, flags, mode = sample_in_float64(run.sample), self.flags[run.training], run.training
        try:
            with in_float64(self.module), torch.set_grad_enabled(run.is_recorded):
                expected = reference(
                    self.module, self.arguments, sample, flags, backward=run.backward
                )
                got = replay(captured, sample, flags, training=mode, backward=run.backward)
                compare(expected, got, "in float64")
        except Exception as error:  # it differs, or the model runs in its own precision only
            _logger.info("the captured graph differs, and in float64: %s", error)
            return False
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class _TraceFit:
    """Traces, and how they fit inputs of other sizes than those that they were made with.

    Attributes:
        traces: by mode.
        second: inputs of another size; None where they fit none.
        seen: what the nodes do with these in training.
        has_gradients: whether gradients were compared with the module's on a small sample.
    """

    traces: dict[bool, Trace]
    second: Sample | None = None
    seen: dict[fx.Node, Observation] | None = None
    has_gradients: bool = False


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
