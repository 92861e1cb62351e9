"""The public entry of capture: traces a module, and checks the trace.

A module is traced in both modes, and traced again with those of its parts kept whole that decide
for themselves. If the modes have different graphs, only one of them is captured.
Whether the trace computes what the module computes is then tried on all inputs that the module is
run with. Before values are compared, decisions of the user's Python that are in the trace have to
come out the same for another size.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lightning_gpp.capture.blocks import BlockGraph, trace_blocks
from lightning_gpp.capture.checks.observers import OBSERVED
from lightning_gpp.capture.checks.rehearsal import MODES, SEED, Rehearsal
from lightning_gpp.capture.checks.rollback import rollback
from lightning_gpp.capture.errors import REMEDY, CaptureError, GuardError, describe
from lightning_gpp.capture.model import CapturedModel, Verified
from lightning_gpp.capture.operators.fingerprint import in_order, node_contents
from lightning_gpp.capture.operators.observe import (
    Observer,
    normalize,
    observation,
    protect_inputs,
)
from lightning_gpp.capture.operators.variation import Cuts, reads_data
from lightning_gpp.capture.tracing.concrete_tracer import trace_concretely
from lightning_gpp.capture.tracing.keep_whole import (
    KeepWholeError,
    LeafPolicy,
    ModesDifferError,
    WholeMethod,
)
from lightning_gpp.capture.tracing.trace import Trace, check_same_graph

_logger = logging.getLogger(__name__)


def capture(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    leaf_modules: Sequence[type | str] = (),
    blocks: BlockGraph | None = None,
    opened: Mapping[str, Sequence[WholeMethod]] = MappingProxyType({}),
    train_modes: Mapping[str, bool] | None = None,
    mode: bool | None = None,
    verified: Verified | None = None,
) -> CapturedModel:
    """Captures ``module.forward(*args, **kwargs)`` as a graph of operators.

    By the ``blocks`` that the user gives, or by running it on the arguments, in train and in eval
    mode, with every call recorded. The result is checked against the module on inputs of another
    size: outputs, buffers and gradients (:mod:`.checks.rehearsal` says why that is enough). The
    module is left as it was, random generators included.

    It runs on the device of the arguments. Weights that are elsewhere come there only while they
    are read (:mod:`.values.placed`).

    Tensors on the ``meta`` device have no values: then only shapes and types are compared, and
    which buffers change is not known.

    Args:
        module: any module; nothing in it is replaced.
        args: one micro-batch, as forward gets it. Call it under the autocast that training uses.
        kwargs: its keyword arguments.
        leaf_modules: types or qualified names of modules to keep whole.
        blocks: the graph by hand.
        opened: layers that would stay whole and are looked into, by name, and what of each stays
            whole; each is one operator nevertheless.
        train_modes: training flag in train mode per qualified name; by default as they are.
        mode: training flag of the mode that is captured if the graph of evaluation is another one;
            by default the module's.
        verified: of the same model, captured with the same arguments in another process: it is
            traced in the same way, without checks.

    Raises:
        CaptureError: it cannot be captured, with the reason and the line. Or the micro-batch has no
            samples.
    """
    policy = replace(LeafPolicy.of(module, leaf_modules), opened=opened)
    runs = Rehearsal(module, args, kwargs or {}, train_modes)
    # Modules that were compiled run as they are written: torch's compiler traces by itself.
    is_compiled = "torch._dynamo" in sys.modules
    with (
        torch.compiler.set_stance("force_eager") if is_compiled else nullcontext(),
        rollback(module),
        torch.inference_mode(False),
        torch.enable_grad(),
        runs.weights.resident(),
    ):
        attempt = _Attempt(runs, blocks, module.training if mode is None else mode)
        if verified is not None:
            if verified.parted:
                runs.take_mode(verified.mode)
            return attempt.as_verified(policy, verified)
        return attempt.verifying(policy)


class _Attempt:
    """Captures one module."""

    def __init__(self, runs: Rehearsal, blocks: BlockGraph | None, mode: bool) -> None:
        self.module, self.runs, self.blocks, self.mode = runs.module, runs, blocks, mode
        self._returned: Any = None
        self._parted = ""
        runs.trace_seed = 0 if blocks is None else SEED

    def as_verified(self, policy: LeafPolicy, verified: Verified) -> CapturedModel:
        """The model as another process captured and checked it.

        Raises:
            CaptureError: this is another model.
        """
        self.runs.take_samples(verified.num_samples)
        OBSERVED.update(map(self.module.get_submodule, verified.observed))
        kinds = (type(self.module.get_submodule(name)) for name in verified.whole)
        policy = replace(policy, types=(*policy.types, *kinds))
        traces = in_order(self._traces(policy), verified.nodes)
        return CapturedModel(self.module, self.runs.arguments, traces, verified, self.runs.sample)

    def verifying(self, policy: LeafPolicy) -> CapturedModel:
        """The model, once its graph is found to compute what it computes.

        Raises:
            CaptureError: there is no such graph.
        """
        runs = self.runs
        runs.begin()
        try:
            captured = self._keeping_whole(policy)
        except Exception as error:  # user code under a tracer may raise anything
            if isinstance(error, ModesDifferError) and not self._parted:
                self._parted = describe(error)
                runs.take_mode(self.mode)
                return self.verifying(policy)
            if not runs.runs_on_given():
                return self.verifying(policy)
            _logger.debug("capturing failed", exc_info=True)
            text = describe(error)
            remedy = f"use torch.where, or {REMEDY}" if " decides by " in text else REMEDY
            name, ours = type(self.module).__name__, isinstance(error, CaptureError)
            raise CaptureError(
                f"{name}.forward cannot be captured:\n  {text}\nRemedy: {remedy}"
            ) from (None if ours else error)
        runs.check_memory(self._returned)
        _take_effects(captured, runs)
        return captured

    def _keeping_whole(self, policy: LeafPolicy) -> CapturedModel:
        """The graph that computes what the module computes.

        Modules whose own Python decides what they compute become leaves, one by one.

        Raises:
            CaptureError: there is none.
        """
        reasons: dict[str, KeepWholeError] = {}
        whole = tuple[str, ...]()
        while True:
            try:
                captured = self._captured(policy, whole)
            except KeepWholeError as error:  # without its frames, which hold all values
                decision = type(error)(str(error), error.scope, on_data=error.on_data)
            else:
                captured.kept_whole = (*reasons, *self._observed(captured))
                by_data = (line for line, reason in reasons.items() if reason.on_data)
                captured.decision = next(by_data, None) or captured.decision
                captured.by_size = not all(reason.on_data for reason in reasons.values())
                return captured
            kind = type(self.module.get_submodule(decision.scope))
            if not decision.scope or kind in policy.types or kind is type(self.module):
                raise decision
            policy = replace(policy, types=(*policy.types, kind))
            whole = (*whole, decision.scope)
            reasons[f"{kind.__name__} stays whole: {describe(decision)}"] = decision

    def _observed(self, captured: CapturedModel) -> list[str]:
        """A line for every class of modules that are not looked into because a hook looks on."""
        parts = map(self.module.get_submodule, captured.leaf_modules)
        kinds = {type(p).__name__ for p in parts if p in OBSERVED and [*p.children()]}
        return [f"{kind} stays whole: a hook looks at its calls" for kind in sorted(kinds)]

    def _traces(self, policy: LeafPolicy) -> dict[bool, Trace]:
        traces = {mode: self._trace(policy, mode) for mode in MODES}
        check_same_graph(traces[True], traces[False])
        return traces

    def _trace(self, policy: LeafPolicy, mode: bool) -> Trace:
        runs, sample, observer = self.runs, self.runs.sample, Observer(self.module)
        with runs.in_mode(mode), runs.weights.visiting():
            if self.blocks is not None:
                trace = trace_blocks(self.module, runs.arguments, self.blocks)
            else:
                trace = trace_concretely(observer, runs.arguments, policy, sample.fresh())
        result, seen = runs.replayed(trace, sample, mode, observer=observer)
        if mode:
            self._returned = result.output
        if protect_inputs(trace, seen):
            _, seen = runs.replayed(trace, sample, mode)
        return normalize(trace, seen)

    def _captured(self, policy: LeafPolicy, whole: tuple[str, ...]) -> CapturedModel:
        """The model that the traces of both modes make.

        Raises:
            CaptureError: it computes something else than the module.
            KeepWholeError: a sub-module decides.
        """
        traces, runs = self._traces(policy), self.runs
        nodes = [node for node in traces[True].graph.nodes if node.op != "output"]
        try:
            seen = runs.check(traces)
        except GuardError as error:
            scope = f"{error.scope}."
            own = (n for n in nodes if f"{n.meta.get('scope', '')}.".startswith(scope))
            on_data = any(map(reads_data, own))
            raise KeepWholeError(str(error), error.scope, on_data=on_data) from error
        cuts = Cuts.of({n: observation(n) for n in nodes}, runs.sample, seen, runs.other)
        how = Verified(runs.sample.num_samples, whole, node_contents(traces[True]), cuts)
        captured = CapturedModel(self.module, runs.arguments, traces, how, runs.sample)
        captured.decision = runs.meets_in_backward(traces[False])
        steady = runs.steady(traces[True], captured.changing)
        captured.verified = replace(how, steady=steady, mode=self.mode, parted=self._parted)
        return captured


def _take_effects(captured: CapturedModel, runs: Rehearsal) -> None:
    """Tells the model, and the user, what forward does beside returning its result.

    Raises:
        CaptureError: it keeps a result that gradients flow through.
    """
    own = runs.own
    leaves = tuple(f"{leaf}." for leaf in captured.leaf_modules)  # do so in a stage, too
    changed = [name for name in own.changes.attributes if not name.startswith(leaves)]
    if kept := [name for name in own.changes.kept if not name.startswith(leaves)]:
        raise CaptureError(
            f"forward stores {', '.join(kept)} as an attribute, with its gradient history. A "
            "pipelined forward runs in other processes and cannot do that. Return the value from "
            "forward instead"
        )
    if runs.withheld:
        _logger.warning(
            "the pipelined forward returns None for %s, which transformers keep for generation "
            "only. Set config.use_cache=False to save their time and memory",
            ", ".join(runs.withheld),
        )
    if changed:
        _logger.warning(
            "forward changes %s, which are neither parameters nor buffers. A pipelined forward "
            "leaves them unchanged",
            ", ".join(changed),
        )
    reads = (read for read in runs.reads if not f"{read.path}.".startswith(leaves))
    captured.verified = replace(
        captured.verified,
        reads=tuple(read for read in reads if read.place not in changed),
        is_random=own.draws,
        observed=tuple(name for name, part in runs.module.named_modules() if part in OBSERVED),
    )
