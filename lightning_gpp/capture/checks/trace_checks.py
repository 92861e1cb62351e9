"""Does a trace compute what the module computes, on all inputs that the module is run with?

Before values are compared, decisions of the user's Python that are in the trace have to come out
the same for another size; those that change nothing are taken out of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from lightning_gpp.capture.checks.check import (
    ValuesDifferError,
    compare,
    in_float64,
    sample_in_float64,
)
from lightning_gpp.capture.checks.rehearsal import MODES, CheckedPass, Rehearsal
from lightning_gpp.capture.errors import GuardError
from lightning_gpp.capture.model import CapturedModel
from lightning_gpp.capture.operators.cuts import Cuts
from lightning_gpp.capture.operators.fingerprint import node_contents
from lightning_gpp.capture.operators.normalize import observation, without_guard
from lightning_gpp.capture.operators.observe import Observation
from lightning_gpp.capture.tracing.trace import Trace, guard
from lightning_gpp.capture.values.samples import Sample, few_samples
from lightning_gpp.capture.verified import Verified

_logger = logging.getLogger(__name__)

_Traces = Mapping[bool, Trace]
_Seen = dict[fx.Node, Observation]


class TraceChecks:
    """Checks traces of one module.

    Args:
        rehearsal: of the module.
    """

    def __init__(self, rehearsal: Rehearsal) -> None:
        self._runs, self._sample = rehearsal, rehearsal.sample

    def checked(self, traces: _Traces, how: Verified) -> CapturedModel:
        """The model that the traces of both modes make.

        Args:
            traces: by mode.
            how: they were made.

        Raises:
            CaptureError: it computes something else than the module.
            GuardError: a sub-module decides by the number of samples.
        """
        how = replace(how, nodes=node_contents(traces[True]))
        fit, dropped = self._without_idle_decisions(traces, how)
        second, seen = self._other_size(fit, is_compared=bool(dropped))
        captured = self._model(fit, replace(how, dropped=dropped), second, seen)
        to_compare = None if dropped else second
        for run in self._runs.passes(to_compare, gradients=not dropped):
            self._check(captured, run)
        return captured

    def _model(
        self,
        traces: _Traces,
        how: Verified,
        second: Sample | None = None,
        others: _Seen | None = None,
    ) -> CapturedModel:
        nodes = [node for node in traces[True].graph.nodes if node.op != "output"]
        seen = {node: observation(node) for node in nodes}
        cuts = Cuts.of(seen, self._sample, others, second)
        runs = self._runs
        return CapturedModel(
            runs.module, runs.arguments, traces, replace(how, cuts=cuts), self._sample
        )

    def _other_size(
        self, traces: _Traces, *, is_compared: bool
    ) -> tuple[Sample | None, _Seen | None]:
        """Inputs of another size that the decisions in the traces allow, and what nodes do there.

        Raises:
            GuardError: a sub-module decides by the number of samples.
        """
        if is_compared and self._sample.num_samples > 2:
            few = few_samples(self._sample, 2)
            return few, self._runs.observed(traces[True], few, training=True)
        for sample in self._runs.others:
            is_smaller = sample.num_samples < self._sample.num_samples
            if self._runs.runs(sample, backward=is_smaller and not is_compared):
                seen = self._seen(traces[True], sample)
                if not isinstance(seen, GuardError):
                    return sample, seen
                self._accept(seen, traces[True], sample)
        return None, None

    def _accept(self, error: GuardError, trace: Trace, sample: Sample) -> None:
        """Warns of a decision of the captured module; one of a sub-module can be kept whole."""
        if scope_of(error, trace):
            raise error
        _logger.warning(
            "captured with micro-batches of %d samples; with %d it would raise: %s",
            self._sample.num_samples,
            sample.num_samples,
            error,
        )

    def _without_idle_decisions(
        self, traces: _Traces, how: Verified
    ) -> tuple[_Traces, tuple[str, ...]]:
        """The traces without decisions between one sample and several that change nothing.

        So is ``if len(x) != 1: x = x.expand(...)``: the graph of either way computes both.

        Returns:
            Them, and the names of the guards that are taken out. If there are any, values and
            gradients were compared.

        Raises:
            GuardError: a sub-module takes such a decision, and it does change something.
        """
        if self._sample.graphs is not None:
            return traces, ()
        across = few_samples(self._sample, 1 + (self._sample.num_samples == 1))
        try:
            failed = self._seen(traces[True], across)
        except Exception:
            if self._runs.runs(across, backward=True):
                raise
            return traces, ()  # the model itself does not take so few
        if not isinstance(failed, GuardError) or not self._runs.runs(across, backward=True):
            return traces, ()
        few = few_samples(self._sample, 2)
        if self._sample.num_samples > 2 and isinstance(self._seen(traces[True], few), GuardError):
            return traces, ()  # it is not about one sample
        first, fit, dropped = failed, traces, list[str]()
        try:
            while isinstance(failed, GuardError):
                dropped.append(failed.name)
                fit = {mode: without_guard(trace, failed.name) for mode, trace in fit.items()}
                failed = self._seen(fit[True], across)
            captured = self._model(fit, how)
            for mode in MODES:
                self._check(captured, CheckedPass(across, mode, backward=True))
        except Exception:  # the graph of the other way may do anything
            self._accept(first, traces[True], across)
            return traces, ()
        return fit, tuple(dropped)

    def _seen(self, trace: Trace, sample: Sample) -> _Seen | GuardError:
        """What the nodes do in training with a sample, or the decision that comes out otherwise."""
        try:
            return self._runs.observed(trace, sample, training=True)
        except GuardError as error:
            return error.with_traceback(None)  # its frames hold all values

    def _check(self, captured: CapturedModel, run: CheckedPass) -> None:
        expected = self._runs.of(run)
        run = replace(run, backward=bool(expected.gradients))
        try:
            compare(expected, self._runs.replayed(captured, run), str(run))
        except ValuesDifferError as error:
            if error.is_large or not (self._varies(run) or self._agrees_in_float64(captured, run)):
                raise

    def _varies(self, run: CheckedPass) -> bool:
        """Whether the module itself differs from run to run by more than rounding, on a device.

        Kernels that add up in any order do, in half precision (backwards of fused attention).
        """
        if self._sample.device.type == "cpu":
            return False
        try:
            compare(self._runs.again(run), self._runs.again(run), str(run))
        except ValuesDifferError as error:
            _logger.info("the module does not compute the same twice: %s", error)
            return True
        return False

    def _agrees_in_float64(self, captured: CapturedModel, run: CheckedPass) -> bool:
        """Whether a difference is rounding: in a higher precision there is none.

        A gradient that large terms cancel into loses most of its digits in float32.
        """
        try:
            with in_float64(self._runs.module):
                double = replace(run, sample=sample_in_float64(run.sample))
                expected = self._runs.again(double)
                compare(expected, self._runs.replayed(captured, double), "in float64")
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
