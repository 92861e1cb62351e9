"""The ways to capture a model, tried one after the other; the public entry."""

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
from lightning_gpp.capture.steady_state import other_content, steady_names
from lightning_gpp.capture.tracing.concrete_tracer import trace_concretely
from lightning_gpp.capture.tracing.keep_whole import KeepWholeError
from lightning_gpp.capture.tracing.leaves import LeafPolicy, has_stacks
from lightning_gpp.capture.tracing.modes import check_same_graph, mode_flags
from lightning_gpp.capture.tracing.switches import uncompiled
from lightning_gpp.capture.tracing.trace import Trace
from lightning_gpp.capture.values.arguments import Arguments
from lightning_gpp.capture.values.host_weights import HostWeights
from lightning_gpp.capture.values.samples import few_samples, first_sample
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
        CaptureError: it cannot be captured; each attempt is listed with its reason and line. Or
            the micro-batch has no samples.
    """
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise CaptureError("lazy parameters have no size yet: run the module once before training")
    policy = LeafPolicy.of(module, leaf_modules)
    with (
        uncompiled(),
        rollback(module),
        torch.inference_mode(False),
        torch.enable_grad(),
        closing(_Session(module, args, kwargs or {}, train_modes, blocks)) as session,
        session.weights.resident(),
    ):
        if verified is not None:
            return session.as_verified(policy, verified)
        if any(item.is_meta for item in session.sample.tensors.values()):
            _logger.info(
                "captured with shapes only: that the graph computes what the module computes was "
                "checked for shapes and types, not for values, and which buffers change is not "
                "known"
            )
        session.begin()
        captured = session.first_success(policy)
        session.take_effects(captured)
    return captured


class _Session:
    """One module, its example inputs and what it computes on them."""

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        train_modes: Mapping[str, bool] | None,
        blocks: BlockGraph | None,
    ) -> None:
        self.module, self.blocks = module, blocks
        self.method = "concrete" if blocks is None else "blocks"
        self.arguments = Arguments.of(module, args, kwargs)
        self.sample = first_sample(self.arguments.tensors(args, kwargs))
        if not self.sample.num_samples:
            raise CaptureError(
                "the first batch has no samples, which do not show how the model goes with them: "
                "begin with another batch. Later ones may be empty"
            )
        self.flags = mode_flags(module, train_modes)
        self.weights = HostWeights(module, self.sample.device)
        self._take_samples(self.sample.num_samples)

    def _take_samples(self, num_samples: int) -> None:
        if num_samples != self.sample.num_samples:
            self.sample = few_samples(self.sample, num_samples)
        self.runs = Rehearsal(self.module, self.arguments, self.sample, self.flags, self.weights)

    def begin(self) -> None:
        """Finds out what the module computes; with one sample twice if it does not train on one."""
        try:
            self.runs.begin()
        except Exception as error:  # of the user's code
            if self.sample.num_samples > 1 or self.sample.graphs is not None:
                raise
            self._take_samples(2)
            try:
                self.runs.begin()
            except Exception:
                raise error from None

    def close(self) -> None:
        """Forgets all values: errors that were kept on the way refer to it from their frames."""
        vars(self.runs).clear()
        vars(self).clear()

    def first_success(self, policy: LeafPolicy) -> CapturedModel:
        """The first attempt that computes what the module computes."""
        policies = [policy]
        if self.blocks is None and has_stacks(self.module):
            policies.append(replace(policy, open_stacks=False))
        failures: list[Exception] = []
        for attempt in policies:
            try:
                return self._keeping_whole(attempt)
            except Exception as error:  # user code under a tracer may raise anything
                _logger.debug("an attempt to capture failed", exc_info=True)
                failures.append(_without_values(error))
        reasons = "\n".join(f"  {reason}" for reason in dict.fromkeys(map(describe, failures)))
        raise CaptureError(
            f"{type(self.module).__name__}.forward cannot be captured:\n{reasons}\n{REMEDY}"
        ) from failures[-1]

    def as_verified(self, policy: LeafPolicy, verified: Verified) -> CapturedModel:
        """The model as another process captured and checked it.

        Raises:
            CaptureError: this is another model.
        """
        self._take_samples(verified.num_samples)
        kinds = (type(self.module.get_submodule(name)) for name in verified.whole)
        policy = replace(policy, types=(*policy.types, *kinds), open_stacks=verified.open_stacks)
        traces = in_order(self._traces(policy), verified.nodes)
        for name in verified.dropped:
            traces = {mode: without_guard(trace, name) for mode, trace in traces.items()}
        return CapturedModel(self.module, self.arguments, traces, verified, self.sample)

    def take_effects(self, captured: CapturedModel) -> None:
        """Tells the model, and the user, what forward does beside returning its result.

        Raises:
            CaptureError: it keeps a result that gradients flow through.
        """
        given = self.runs.given
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
        steady = self._steady_state(captured)
        captured.meetings = self.runs.meetings()
        captured.verified = replace(
            captured.verified,
            steady=steady,
            reads=tuple(
                read
                for read in self.runs.reads
                if not f"{read.path}.".startswith(leaves) and read.place not in changed
            ),
            is_random=given.draws,
        )

    def _steady_state(self, captured: CapturedModel) -> frozenset[str]:
        """The buffers that forward changes in training mode, whatever it is called with."""
        changing = captured.changing
        if not changing:
            return frozenset()
        try:
            other = self.runs.of(CheckedPass(other_content(self.sample), True))
        except Exception as error:  # the model itself may not take this size
            _logger.info("which buffers change alike cannot be told: %s", error)
            return frozenset()
        return steady_names(self.module, changing, self.runs.given.buffers, other.buffers)

    def _keeping_whole(self, policy: LeafPolicy) -> CapturedModel:
        """Modules whose own Python decides what they compute become leaves, one by one."""
        reasons: dict[str, KeepWholeError] = {}
        whole = tuple[str, ...]()
        while True:
            how = Verified(self.sample.num_samples, self.method, policy.open_stacks, whole)
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
        def traced(observer: Observer) -> Trace:
            if self.blocks is not None:
                return trace_blocks(self.module, self.arguments, self.blocks)
            inputs = self.sample.fresh()
            return trace_concretely(self.module, self.arguments, policy, inputs, observer=observer)

        trace, observer = self.runs.traced(mode, traced)
        observations = self.runs.observed(trace, self.sample, mode, observer)
        if protect_inputs(trace, observations):
            observations = self.runs.observed(trace, self.sample, mode)
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
