"""The ways to capture a model, tried one after the other; the public entry."""

from __future__ import annotations

import dataclasses
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_gpp.capture.blocks import BlockGraph, trace_blocks
from lightning_gpp.capture.checks.references import CheckedPass, References
from lightning_gpp.capture.checks.rollback import rollback
from lightning_gpp.capture.checks.trace_checks import TraceChecks, scope_of
from lightning_gpp.capture.errors import REMEDY, CaptureError, GuardError, describe
from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.operators.normalize import (
    normalize,
    protect_inputs,
    without_guard,
)
from lightning_gpp.capture.operators.observe import Observer
from lightning_gpp.capture.operators.order import in_order
from lightning_gpp.capture.steady_state import other_content, steady_names
from lightning_gpp.capture.tracing.concrete_tracer import trace_concretely
from lightning_gpp.capture.tracing.fx_tracer import trace_symbolically
from lightning_gpp.capture.tracing.keep_whole import DrawError, KeepWholeError, line_of_draw
from lightning_gpp.capture.tracing.leaves import LeafPolicy, has_stacks
from lightning_gpp.capture.tracing.library_switches import uncompiled
from lightning_gpp.capture.tracing.modes import check_same_graph, mode_flags
from lightning_gpp.capture.tracing.trace import Trace
from lightning_gpp.capture.values.arguments import Arguments
from lightning_gpp.capture.values.host_weights import HostWeights
from lightning_gpp.capture.values.samples import first_sample
from lightning_gpp.capture.values.withheld import withheld_outputs
from lightning_gpp.capture.verified import Verified

_logger = logging.getLogger(__name__)

Tracer = Callable[[LeafPolicy, Observer], Trace]
E = TypeVar("E", bound=BaseException)


def capture(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    leaf_modules: Sequence[type | str] = (),
    blocks: BlockGraph | None = None,
    train_modes: Mapping[str, bool] | None = None,
    verified: Verified | None = None,
) -> CapturedModel:
    """Captures ``module.forward(*args, **kwargs)`` as a graph of operators.

    Tried in this order: the ``blocks`` that the user gives (then nothing else), ``torch.fx``, the
    concrete tracer. Each result is checked against the module, in train and in eval mode: outputs
    and buffers on the given input and on one of another size, gradients on the smaller of the two
    (:mod:`.checks.references` says why that is enough). The module is left as it was, random
    generators included.

    It runs on the device of the arguments. Weights that are elsewhere come there only while they
    are read (:mod:`.values.host_weights`).

    Tensors on the ``meta`` device have no values: then only shapes and types are compared, and
    which buffers change is not known; the log says so (level info).

    Args:
        module: any module; nothing in it is replaced.
        args: one micro-batch, as forward gets it. Call it under the autocast that training uses.
        kwargs: its keyword arguments.
        leaf_modules: types or qualified names of modules to keep whole.
        blocks: the graph by hand.
        train_modes: training flag in train mode per qualified name; by default as they are.
        verified: of the same model, captured with the same arguments in another process: it is
            traced in the same way, without checks.

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
        session.weights.resident(),
    ):
        if verified is None and any(item.is_meta for item in session.sample.tensors.values()):
            _logger.info(
                "captured with shapes only: that the graph computes what the module computes was "
                "checked for shapes and types, not for values, and which buffers change is not "
                "known"
            )
        if verified is not None:
            return session.as_verified(leaf_modules, blocks, verified)
        session.checks.begin()
        captured = session.first_success(leaf_modules, blocks)
        captured.steady = session.steady_state(captured)
        _note_effects(captured, session.checks.references)
    return captured


def _note_effects(captured: CapturedModel, references: References) -> None:
    """Tells the model, and the user, what forward does beside returning its result.

    Raises:
        CaptureError: it keeps a result that gradients flow through.
    """
    captured.is_random = references.given.draws
    captured.meetings = references.meetings()
    changed = _outside_of_leaves(captured, references.given.changed)
    kept = _outside_of_leaves(captured, references.given.kept)
    if kept:
        raise CaptureError(
            f"forward keeps {', '.join(kept)}, a result that gradients flow through, as an "
            "attribute; a pipelined forward runs elsewhere and cannot leave it behind. Return "
            "it from forward instead"
        )
    if withheld := withheld_outputs(references.given.output):
        _logger.warning(
            "not handed out by the pipelined forward, an error if read: %s. Keys and values "
            "that transformers keep for generation are not for training: "
            "config.use_cache=False saves their time and memory",
            ", ".join(f"{item.path} ({item.kind})" for item in withheld),
        )
    captured.reads = tuple(
        read
        for read in references.reads
        if not _is_inside(captured, read.path)
        and ".".join(filter(None, (read.path, read.name))) not in changed
    )
    if changed:
        _logger.warning(
            "forward changes %s, which are neither parameters nor buffers: a pipelined forward "
            "does not make these changes",
            ", ".join(changed),
        )


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
        self.weights = HostWeights(module, self.sample.device)
        self.checks = TraceChecks(module, self.arguments, self.sample, self.flags, self.weights)

    def close(self) -> None:
        """Forgets all values: errors that were kept on the way refer to it from their frames."""
        self.checks.close()
        vars(self).clear()

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

    def as_verified(
        self, leaf_modules: Sequence[type | str], blocks: BlockGraph | None, verified: Verified
    ) -> CapturedModel:
        """The model as another process captured and checked it.

        Raises:
            CaptureError: this is another model.
        """
        policy, tracer = next(
            (policy, tracer)
            for method, policy, tracer in self._attempts(leaf_modules, blocks)
            if (method, policy.open_stacks) == (verified.method, verified.open_stacks)
        )
        kinds = (type(self.module.get_submodule(name)) for name in verified.whole)
        policy = dataclasses.replace(policy, types=(*policy.types, *kinds))
        traces = self._traces(policy, tracer)
        traces = in_order(traces, verified.nodes)
        for name in verified.dropped:
            traces = {mode: without_guard(trace, name) for mode, trace in traces.items()}
        captured = self.checks.model(verified.method, traces, verified.cuts)
        captured.open_stacks, captured.whole = verified.open_stacks, verified.whole
        captured.nodes_at_first, captured.dropped = verified.nodes, verified.dropped
        captured.steady = verified.steady
        captured.reads, captured.is_random = verified.reads, verified.is_random
        return captured

    def steady_state(self, captured: CapturedModel) -> frozenset[str]:
        """The buffers that forward changes in training mode, whatever it is called with."""
        changing = captured.changing
        if not changing:
            return frozenset()
        try:
            other = self.checks.references.of(CheckedPass(other_content(self.sample), True))
        except Exception as error:  # the model itself may not take this size
            _logger.info("which buffers change alike cannot be told: %s", error)
            return frozenset()
        given = self.checks.references.given.buffers
        return steady_names(self.module, changing, given, other.buffers)

    def _attempts(
        self, leaf_modules: Sequence[type | str], blocks: BlockGraph | None
    ) -> Iterator[tuple[str, LeafPolicy, Tracer]]:
        open_policy = LeafPolicy.of(self.module, leaf_modules)
        if blocks is not None:
            yield (
                "blocks",
                open_policy,
                lambda *_: trace_blocks(self.module, self.arguments, blocks),
            )
            return
        policies = [open_policy]
        if has_stacks(self.module):
            policies.append(dataclasses.replace(open_policy, open_stacks=False))
        for policy in policies:
            yield "torch.fx", policy, self._symbolically
            yield "concrete", policy, self._concretely

    def _symbolically(self, policy: LeafPolicy, _: Observer) -> Trace:
        return trace_symbolically(self.module, self.arguments, policy, self.sample.device)

    def _concretely(self, policy: LeafPolicy, observer: Observer) -> Trace:
        inputs = self.sample.fresh()
        return trace_concretely(self.module, self.arguments, policy, inputs, observer=observer)

    def _keeping_whole(
        self, method: str, policy: LeafPolicy, tracer: Tracer, decision: KeepWholeError
    ) -> CapturedModel:
        """Modules whose own Python decides what they compute become leaves, one by one."""
        reasons: dict[str, KeepWholeError] = {}
        whole = []
        while True:
            policy = self._with_leaf(policy, decision)
            whole.append(decision.scope)
            line = f"{policy.types[-1].__name__} stays whole: {describe(decision)}"
            reasons[line] = decision
            try:
                captured = self._captured(method, policy, tracer)
            except KeepWholeError as another:
                decision = _without_values(another)
            else:
                captured.kept_whole, captured.whole = tuple(reasons), tuple(whole)
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
        with self.checks.in_mode(True):
            line = line_of_draw(lambda: self.module.forward(*args, **kwargs))
        return CaptureError(
            f"{line} draws a random number outside of torch (random, numpy), which would be frozen "
            f"into the graph: draw it with torch.rand(...) and compute with the tensor: {REMEDY}"
        )

    def _captured(self, method: str, policy: LeafPolicy, tracer: Tracer) -> CapturedModel:
        traces = self._traces(policy, tracer)
        try:
            captured = self.checks.checked(method, traces)
        except GuardError as error:
            raise KeepWholeError(str(error), scope_of(error, traces[True])) from error
        captured.open_stacks = policy.open_stacks
        return captured

    def _traces(self, policy: LeafPolicy, tracer: Tracer) -> dict[bool, Trace]:
        traces = {mode: self._trace(policy, tracer, mode) for mode in (True, False)}
        check_same_graph(traces[True], traces[False])
        return traces

    def _trace(self, policy: LeafPolicy, tracer: Tracer, mode: bool) -> Trace:
        observer = Observer(self.module, self.weights.source)
        with self.checks.in_mode(mode):
            trace = tracer(policy, observer)
        observations = self.checks.observed(trace, self.sample, mode, observer)
        if protect_inputs(trace, observations):
            observations = self.checks.observed(trace, self.sample, mode)
        return normalize(trace, observations)


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
