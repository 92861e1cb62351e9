"""Does a trace compute what the module computes, on all inputs that the module is run with?

Before values are compared, decisions of the user's Python that are in the trace have to come out
the same for another size; those that change nothing are taken out of it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import fx, nn

from lightning_gpp.capture.checks.check import (
    DigestsDifferError,
    Result,
    ValuesDifferError,
    compare,
    in_float64,
    replay,
    sample_in_float64,
)
from lightning_gpp.capture.checks.references import MODES, CheckedPass, References
from lightning_gpp.capture.checks.rollback import rollback, seeded, training_flags
from lightning_gpp.capture.errors import GuardError
from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.operators.cuts import Cuts
from lightning_gpp.capture.operators.fingerprint import node_contents
from lightning_gpp.capture.operators.normalize import observation, without_guard
from lightning_gpp.capture.operators.observe import Observation, Observer, observe
from lightning_gpp.capture.tracing.trace import Trace, guard
from lightning_gpp.capture.values.arguments import Arguments
from lightning_gpp.capture.values.host_weights import HostWeights
from lightning_gpp.capture.values.samples import Sample, few_samples

_logger = logging.getLogger(__name__)

_WITH_FEW = "with few samples"
"""In a node's ``meta``: what it does with two samples, while decisions are taken out."""


class TraceChecks:
    """Checks traces of one module.

    Args:
        module: whose.
        arguments: of its forward.
        sample: the given inputs.
        flags: training flags of the sub-modules by mode.
        weights: how the module's weights come to the device of the inputs.

    Attributes:
        references: what the module itself computes, from :meth:`begin` on.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: Arguments,
        sample: Sample,
        flags: Mapping[bool, Mapping[str, bool]],
        weights: HostWeights,
    ) -> None:
        self.module, self.arguments, self.sample, self.flags = module, arguments, sample, flags
        self.weights = weights
        self.references: References

    def begin(self) -> None:
        """Finds out what the module computes, before anything is traced."""
        self.references = References(
            self.module, self.arguments, self.sample, self.flags, self.weights
        )

    def close(self) -> None:
        """Forgets all values, as the frames of an error may refer to it."""
        vars(self).clear()

    def checked(self, method: str, traces: dict[bool, Trace]) -> CapturedModel:
        """The model that the traces of both modes make.

        Raises:
            CaptureError: it computes something else than the module.
            GuardError: a sub-module decides by the number of samples.
        """
        fit = self._fitting(method, traces)
        captured = self._model(method, fit)
        captured.nodes_at_first, captured.dropped = node_contents(traces[True]), fit.dropped
        second = None if fit.is_compared else fit.second
        for run in self.references.passes(second, gradients=not fit.is_compared):
            self._check(captured, run)
        return captured

    def _model(self, method: str, fit: _TraceFit) -> CapturedModel:
        nodes = [node for node in fit.traces[True].graph.nodes if node.op != "output"]
        seen = {node: observation(node) for node in nodes}
        cuts = Cuts.of(seen, self.sample, fit.seen, fit.second)
        return self.model(method, fit.traces, cuts)

    def model(self, method: str, traces: Mapping[bool, Trace], cuts: Cuts) -> CapturedModel:
        """The model that traces make, unchecked."""
        device = self.sample.device
        captured = CapturedModel(self.module, self.arguments, traces, cuts, method, device)
        captured.takes_graphs = self.sample.graphs is not None
        return captured

    def observed(
        self, trace: Trace, sample: Sample, mode: bool, observer: Observer | None = None
    ) -> dict[fx.Node, Observation]:
        """What the nodes of a trace do with a sample."""
        with self.in_mode(mode):
            observer = observer or Observer(self.module, self.weights.source)
            return observe(trace.graph, sample.fresh(), observer)

    @contextmanager
    def in_mode(self, mode: bool) -> Iterator[None]:
        """The module in a mode, whatever it does there taken back."""
        with (
            rollback(self.module),
            training_flags(self.module, self.flags[mode]),
            seeded(0),
            self.weights.visiting(),
        ):
            yield

    @functools.cached_property
    def _across(self) -> Sample:
        """One sample instead of several, or two instead of one."""
        return few_samples(self.sample, 1 + (self.sample.num_samples == 1))

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
        if fit.seen is not None:
            return fit
        for sample in self.references.others:
            is_smaller = sample.num_samples < self.sample.num_samples
            if not self.references.runs(sample, backward=is_smaller and not fit.is_compared):
                continue
            seen = self._seen(fit.traces[True], sample)
            if not isinstance(seen, GuardError):
                return dataclasses.replace(fit, second=sample, seen=seen)
            self._accept(seen, fit.traces[True], sample.num_samples)
        return fit

    def _accept(self, error: GuardError, trace: Trace, num_samples: int) -> None:
        """Warns of a decision of the captured module; one of a sub-module can be kept whole."""
        if scope_of(error, trace):
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
        traces, across = fit.traces, self._across
        try:
            first = failed = self._failing_guard(traces[True], across)
        except Exception:
            if self.references.runs(across, backward=True):
                raise
            return fit  # the model itself does not take so few
        if first is None or not self.references.runs(across, backward=True):
            return fit
        few = None
        if self.sample.num_samples > 2:
            few = few_samples(self.sample, 2)
            seen = self._seen(traces[True], few)
            if isinstance(seen, GuardError):
                return fit  # it is not about one sample
            for node in seen:
                node.meta[_WITH_FEW] = seen[node]
        try:
            dropped = []
            while failed is not None:
                dropped.append(failed.name)
                traces = {mode: without_guard(trace, failed.name) for mode, trace in traces.items()}
                failed = self._failing_guard(traces[True], across)
            without = _TraceFit(traces, is_compared=True, dropped=tuple(dropped))
            captured = self._model(method, without)
            for mode in MODES:
                self._check(captured, CheckedPass(across, mode, backward=True))
        except Exception:  # the graph of the other way may do anything
            raise first from None
        if few is None:
            return without
        nodes = (node for node in traces[True].graph.nodes if node.op != "output")
        seen = {node: node.meta[_WITH_FEW] for node in nodes}
        return dataclasses.replace(without, second=few, seen=seen)

    def _failing_guard(self, trace: Trace, sample: Sample) -> GuardError | None:
        seen = self._seen(trace, sample)
        return seen if isinstance(seen, GuardError) else None

    def _seen(self, trace: Trace, sample: Sample) -> dict[fx.Node, Observation] | GuardError:
        """What the nodes do in training with a sample, or the decision that comes out otherwise."""
        try:
            return self.observed(trace, sample, mode=True)
        except GuardError as error:
            return error.with_traceback(None)  # its frames hold all values

    def _check(self, captured: CapturedModel, run: CheckedPass) -> None:
        expected, got = self.references.of(run), self._replayed(captured, run)
        try:
            try:
                compare(expected, got, str(run))
            except DigestsDifferError:
                self._compare_kept(captured, run, str(run))
        except ValuesDifferError as error:
            if error.is_large or not (self._varies(run) or self._agrees_in_float64(captured, run)):
                raise

    def _compare_kept(self, captured: CapturedModel, run: CheckedPass, what: str) -> None:
        """Compares results with all gradients."""
        expected = self.references.again(run, keeps_gradients=True)
        compare(expected, self._replayed(captured, run, keeps_gradients=True), what)

    def _replayed(
        self, captured: CapturedModel, run: CheckedPass, *, keeps_gradients: bool = False
    ) -> Result:
        with torch.set_grad_enabled(run.is_recorded):
            return replay(
                captured,
                run.sample,
                self.flags[run.training],
                self.weights,
                training=run.training,
                backward=run.backward,
                keeps_gradients=keeps_gradients,
            )

    def _varies(self, run: CheckedPass) -> bool:
        """Whether the module itself differs from run to run by more than rounding, on a device.

        Kernels that add up in any order do, in half precision (backwards of fused attention).
        """
        if self.sample.device.type == "cpu":
            return False
        one, other = (self.references.again(run, keeps_gradients=True) for _ in range(2))
        try:
            compare(one, other, str(run))
        except ValuesDifferError as error:
            _logger.info("the module does not compute the same twice: %s", error)
            return True
        return False

    def _agrees_in_float64(self, captured: CapturedModel, run: CheckedPass) -> bool:
        """Whether a difference is rounding: in a higher precision there is none.

        A gradient that large terms cancel into loses most of its digits in float32.
        """
        try:
            with in_float64(self.module):
                double = dataclasses.replace(run, sample=sample_in_float64(run.sample))
                self._compare_kept(captured, double, "in float64")
        except Exception as error:  # it differs, or the model runs in its own precision only
            _logger.info("the captured graph differs, and in float64: %s", error)
            return False
        return True


def scope_of(error: GuardError, trace: Trace) -> str:
    """The module that took a decision."""
    for node in trace.graph.nodes:
        if node.target is guard and node.args[3] == error.location:
            return str(node.meta["scope"])
    return ""


@dataclasses.dataclass(frozen=True, slots=True)
class _TraceFit:
    """Traces, and how they fit inputs of other sizes than those that they were made with.

    Attributes:
        traces: by mode.
        second: inputs of another size; None where they fit none.
        seen: what the nodes do with these in training.
        is_compared: whether values and gradients were compared with the module's on another size.
        dropped: names of the guards that were taken out.
    """

    traces: dict[bool, Trace]
    second: Sample | None = None
    seen: dict[fx.Node, Observation] | None = None
    is_compared: bool = False
    dropped: tuple[str, ...] = ()
