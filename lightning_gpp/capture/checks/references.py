"""What a module itself computes on the inputs that a graph of it is checked with.

Values are compared on every sample, in train and in eval mode, gradients on the smallest sample
only: the operators of a graph are the same for all samples, autograd derives the backward from
them, and a detached or doubled path shows at any size. Whatever the module computes, it computes
once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from lightning_gpp.capture.checks.check import Result, reference
from lightning_gpp.capture.checks.meeting import SampleMeeting, meeting
from lightning_gpp.capture.tracing.reads import watched_reads
from lightning_gpp.capture.values.arguments import Arguments
from lightning_gpp.capture.values.host_weights import HostWeights
from lightning_gpp.capture.values.samples import Sample, other_samples

_logger = logging.getLogger(__name__)

MODES = (True, False)
"""Training flags."""


@dataclass(frozen=True, slots=True)
class CheckedPass:
    """One run of a module and of a graph of it.

    Attributes:
        sample: the inputs.
        training: the mode.
        backward: whether gradients are computed.
        is_recorded: whether autograd records the forward.
    """

    sample: Sample
    training: bool
    backward: bool = False
    is_recorded: bool = True

    def __str__(self) -> str:
        mode = "train" if self.training else "eval"
        without = "" if self.is_recorded else ", without gradients"
        return f"{mode} mode, {self.sample.num_samples} samples{without}"


_Key = tuple[int, bool, bool, bool]


class References:
    """The results of a module.

    Args:
        module: whose.
        arguments: of its forward.
        sample: the given inputs.
        flags: training flags of the sub-modules by mode.
        weights: how the module's weights come to the device of the inputs.

    Attributes:
        sample: the given inputs.
        others: candidates for inputs of another size.
        reads: plain attributes that forward reads.
        given: what forward returns and changes in train mode with the given inputs.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: Arguments,
        sample: Sample,
        flags: Mapping[bool, Mapping[str, bool]],
        weights: HostWeights,
    ) -> None:
        self._module, self._arguments, self._flags = module, arguments, flags
        self._weights = weights
        self._results: dict[_Key, Result | None] = {}
        self._runs: list[tuple[CheckedPass, Result]] = []
        self.sample, self.others = sample, list(other_samples(sample))
        is_smallest = all(other.num_samples >= sample.num_samples for other in self.others)
        with watched_reads(module) as self.reads:
            self.given = self.of(CheckedPass(sample, True, backward=is_smallest))
        self._unrecorded = CheckedPass(sample, False, is_recorded=False)
        if is_smallest or not self._is_there(self._unrecorded):
            self.of(CheckedPass(sample, False, backward=is_smallest))

    def of(self, run: CheckedPass) -> Result:
        """What the module computes; raises what it raises."""
        if run.is_recorded and not run.backward:
            found = self._results.get(_key(replace(run, backward=True)))
            if found is not None:  # it has the values, too
                return replace(found, gradients={})
        found = self._results.get(_key(run))
        if found is None:
            found = self._results[_key(run)] = self.again(run)
            self._runs.append((run, found))
        return found

    def again(self, run: CheckedPass, *, keeps_gradients: bool = False) -> Result:
        """What the module computes, computed once more; without gradients where it has none.

        In evaluation mode a forward that takes a gradient inside frees the graph, for example.

        Args:
            run: in what.
            keeps_gradients: whether those of parameters in files are kept, too.
        """
        compute = partial(
            reference,
            self._module,
            self._arguments,
            run.sample,
            self._flags[run.training],
            self._weights,
            keeps_gradients=keeps_gradients,
        )
        with torch.set_grad_enabled(run.is_recorded):
            try:
                return compute(backward=run.backward)
            except RuntimeError:
                if run.training or not run.backward:
                    raise
                return compute(backward=False)

    def runs(self, sample: Sample, *, backward: bool) -> bool:
        """Whether the module runs on other inputs, in both modes."""
        # The other way round than with the given ones: what goes by the number of calls shows.
        return all(self._is_there(CheckedPass(sample, mode, backward)) for mode in reversed(MODES))

    def meetings(self) -> dict[bool, SampleMeeting]:
        """Where samples meet in each mode, or in the other where a tape saw only that."""
        found = {mode: self._meeting(mode) for mode in MODES}
        return {
            mode: meeting
            for mode in MODES
            if (meeting := found[mode] or found[not mode]) is not None
        }

    def _meeting(self, training: bool) -> SampleMeeting | None:
        """Where they meet in a mode; None where not two numbers of samples ran on tapes."""
        found = None
        tapes = [
            (run.sample, result.tape) for run, result in self._runs if run.training is training
        ]
        for sample, tape in tapes:
            if tape is None or sample.num_samples == self.sample.num_samples:
                continue
            for given, other in tapes:
                if other is not None and given is self.sample:
                    nums = given.num_samples, sample.num_samples
                    found = meeting(other, tape, *nums, of_graphs=given.graphs is not None)
                    if found.outputs:
                        return found
        return found

    def passes(self, second: Sample | None, *, gradients: bool) -> Iterator[CheckedPass]:
        """All that a graph is checked with.

        Args:
            second: inputs of another size, if there are such.
            gradients: whether to compare gradients, too.
        """
        samples = [self.sample] if second is None else [self.sample, second]
        smallest = min(samples, key=lambda each: each.num_samples) if gradients else None
        unrecorded = self._is_there(self._unrecorded)
        for mode in MODES:
            for sample in samples:
                run = CheckedPass(sample, mode, backward=sample is smallest)
                if not unrecorded or run.backward or mode or sample is not self.sample:
                    yield run
        if unrecorded:
            yield self._unrecorded

    def _is_there(self, run: CheckedPass) -> bool:
        """Whether the module itself makes a pass; it need not take each size and mode."""
        key = _key(run)
        if self._results.get(key, run) is None:
            return False
        try:
            self.of(run)
        except Exception as error:  # of the user's code
            _logger.info("the model does not run in %s: %s", run, error)
            self._results[key] = None
            return False
        return True


def _key(run: CheckedPass) -> _Key:
    return id(run.sample), run.training, run.backward, run.is_recorded
