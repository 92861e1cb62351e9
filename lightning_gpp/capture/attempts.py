"""From a module to a captured model: the public entry."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_gpp.capture.blocks import BlockGraph, trace_blocks
from lightning_gpp.capture.checks.rehearsal import MODES, CheckedPass, Rehearsal
from lightning_gpp.capture.checks.rollback import rollback
from lightning_gpp.capture.checks.trace_checks import TraceChecks, scope_of
from lightning_gpp.capture.errors import REMEDY, CaptureError, GuardError, describe
from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.operators.normalize import normalize, protect_inputs, without_guard
from lightning_gpp.capture.operators.observe import Observer
from lightning_gpp.capture.operators.order import in_order
from lightning_gpp.capture.steady_state import steady_names
from lightning_gpp.capture.tracing.concrete_tracer import trace_concretely
from lightning_gpp.capture.tracing.keep_whole import KeepWholeError
from lightning_gpp.capture.tracing.leaves import LeafPolicy
from lightning_gpp.capture.tracing.modes import check_same_graph
from lightning_gpp.capture.tracing.switches import uncompiled
from lightning_gpp.capture.tracing.trace import Trace
from lightning_gpp.capture.values.samples import other_content
from lightning_gpp.capture.values.withheld import withheld_outputs
from lightning_gpp.capture.verified import Verified

_logger = logging.getLogger(__name__)

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

    By the ``blocks`` that the user gives, or by running it on the arguments with every call
    recorded. The result is checked against the module, in train and in eval mode: outputs and
    buffers on the given input and on one of another size, gradients on the smaller of the two
    (:mod:`.checks.rehearsal` says why that is enough). The module is left as it was, random
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
        CaptureError: it cannot be captured, with the reason and the line. Or the micro-batch has no
            samples.
    """
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise CaptureError("lazy parameters have no size yet: run the module once before training")
    policy = LeafPolicy.of(module, leaf_modules)
    with (
        uncompiled(),
        rollback(module),
        torch.inference_mode(False),
        torch.enable_grad(),
        closing(Rehearsal(module, args, kwargs or {}, train_modes)) as runs,
        runs.weights.resident(),
    ):
        attempt = _Attempt(runs, blocks)
        if verified is not None:
            return attempt.as_verified(policy, verified)
        if any(item.is_meta for item in runs.sample.tensors.values()):
            _logger.info(
                "captured with shapes only: that the graph computes what the module computes was "
                "checked for shapes and types, not for values, and which buffers change is not "
                "known"
            )
        runs.begin()
        captured = attempt.checked(policy)
        _take_effects(captured, runs)
    return captured


class _Attempt:
    """Captures one module."""

    def __init__(self, runs: Rehearsal, blocks: BlockGraph | None) -> None:
        self.module, self.runs, self.blocks = runs.module, runs, blocks

    def checked(self, policy: LeafPolicy) -> CapturedModel:
        """The graph that computes what the module computes.

        Raises:
            CaptureError: there is none.
        """
        try:
            return self._keeping_whole(policy)
        except Exception as error:  # user code under a tracer may raise anything
            _logger.debug("capturing failed", exc_info=True)
            raise CaptureError(
                f"{type(self.module).__name__}.forward cannot be captured:\n  "
                f"{describe(_without_values(error))}\n{REMEDY}"
            ) from error

    def as_verified(self, policy: LeafPolicy, verified: Verified) -> CapturedModel:
        """The model as another process captured and checked it.

        Raises:
            CaptureError: this is another model.
        """
        self.runs.take_samples(verified.num_samples)
        kinds = (type(self.module.get_submodule(name)) for name in verified.whole)
        policy = replace(policy, types=(*policy.types, *kinds))
        own = self._traces(policy)
        traces = in_order(own, verified.nodes)
        for mode in MODES if traces != own else ():
            observations = self.runs.observed(traces[mode], self.runs.sample, mode)
            for node, observation in observations.items():
                node.meta["observation"] = observation
        for name in verified.dropped:
            traces = {mode: without_guard(trace, name) for mode, trace in traces.items()}
        return CapturedModel(self.module, self.runs.arguments, traces, verified, self.runs.sample)

    def _keeping_whole(self, policy: LeafPolicy) -> CapturedModel:
        """Modules whose own Python decides what they compute become leaves, one by one."""
        reasons: dict[str, KeepWholeError] = {}
        whole = tuple[str, ...]()
        while True:
            how = Verified(self.runs.sample.num_samples, whole)
            try:
                captured = self._captured(policy, how)
            except KeepWholeError as error:
                decision = _without_values(error)
            else:
                captured.kept_whole = tuple(reasons)
                by_data = (line for line, reason in reasons.items() if reason.on_data)
                captured.decision = next(by_data, None)
                return captured
            kind = type(self.module.get_submodule(decision.scope))
            if not decision.scope or kind in policy.types or kind is type(self.module):
                raise decision
            policy = replace(policy, types=(*policy.types, kind))
            whole = (*whole, decision.scope)
            reasons[f"{kind.__name__} stays whole: {describe(decision)}"] = decision

    def _captured(self, policy: LeafPolicy, how: Verified) -> CapturedModel:
        traces = self._traces(policy)
        try:
            return TraceChecks(self.runs).checked(traces, how)
        except GuardError as error:
            raise KeepWholeError(str(error), scope_of(error, traces[True])) from error

    def _traces(self, policy: LeafPolicy) -> dict[bool, Trace]:
        traces = {mode: self._trace(policy, mode) for mode in MODES}
        check_same_graph(traces[True], traces[False])
        return traces

    def _trace(self, policy: LeafPolicy, mode: bool) -> Trace:
        module, arguments, sample = self.module, self.runs.arguments, self.runs.sample

        def traced(observer: Observer) -> Trace:
            if self.blocks is not None:
                return trace_blocks(module, arguments, self.blocks)
            return trace_concretely(module, arguments, policy, sample.fresh(), observer=observer)

        trace, observer = self.runs.traced(mode, traced)
        observations = self.runs.observed(trace, sample, mode, observer)
        if protect_inputs(trace, observations):
            observations = self.runs.observed(trace, sample, mode)
        return normalize(trace, observations)


def _take_effects(captured: CapturedModel, runs: Rehearsal) -> None:
    """Tells the model, and the user, what forward does beside returning its result.

    Raises:
        CaptureError: it keeps a result that gradients flow through.
    """
    given = runs.given
    leaves = tuple(f"{leaf}." for leaf in captured.leaf_modules)  # do so in a stage, too
    changed = [name for name in given.changed if not name.startswith(leaves)]
    if kept := [name for name in given.kept if not name.startswith(leaves)]:
        raise CaptureError(
            f"forward keeps {', '.join(kept)}, a result that gradients flow through, as an "
            "attribute; a pipelined forward runs elsewhere and cannot leave it behind. Return "
            "it from forward instead"
        )
    if withheld := withheld_outputs(given.output):
        _logger.warning(
            "not handed out by the pipelined forward, an error if read: %s. Keys and values "
            "that transformers keep for generation are not for training: "
            "config.use_cache=False saves their time and memory",
            ", ".join(f"{item.path} ({item.kind})" for item in withheld),
        )
    if changed:
        _logger.warning(
            "forward changes %s, which are neither parameters nor buffers: a pipelined forward "
            "does not make these changes",
            ", ".join(changed),
        )
    steady = _steady_state(captured, runs)
    captured.meetings = runs.meetings()
    captured.verified = replace(
        captured.verified,
        steady=steady,
        reads=tuple(
            read
            for read in runs.reads
            if not f"{read.path}.".startswith(leaves) and read.place not in changed
        ),
        is_random=given.draws,
    )


def _steady_state(captured: CapturedModel, runs: Rehearsal) -> frozenset[str]:
    """The buffers that forward changes in training mode, whatever it is called with."""
    changing = captured.changing
    if not changing:
        return frozenset()
    try:
        other = runs.of(CheckedPass(other_content(runs.sample), True))
    except Exception as error:  # the model itself may not take this size
        _logger.info("which buffers change alike cannot be told: %s", error)
        return frozenset()
    return steady_names(runs.module, changing, runs.given.buffers, other.buffers)


def _without_values(error: E) -> E:
    """An error that is kept while other ways are tried, without what its frames held.

    A frame and the error that it keeps are a circle: values would stay until Python looks for such.
    """
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__
    return error
