"""What a plan gains over one device, in a sentence that a person can act on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_gpp.common.text_table import wrapped
from lightning_gpp.common.units_of_measure import (
    bytes_text,
    count_text,
    number_text,
    percent_text,
    seconds_text,
)
from lightning_gpp.planner.base import HOLDS_FEW, PlanRequest
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_plan, plan_devices

OWN = "your step, data, optimizer and Lightning's loop"
"""What is in no prediction."""

AS_FAST = 1.05
"""Gains below this factor are called none: predictions are not closer than that."""


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """What batches really took.

    Attributes:
        batch_s: their median, from the beginning of one to that of the next.
        num_batches: how many they were.
        own_s: median seconds of it that are the user's: the step, the data, the optimizer and the
            loop; None where they cannot be told from the pipeline.
    """

    batch_s: float
    num_batches: int
    own_s: float | None = None


@dataclass(frozen=True, slots=True)
class PlanVerdict:
    """A plan beside one device of the same cluster that runs the whole model.

    Both are predicted from operators and messages alone: the user's step, the data, the optimizer
    and Lightning's loop are in neither. Steps of some milliseconds consist of that, so
    :meth:`measured_text` has the better verdict where batches could be timed.

    Attributes:
        num_devices: that the plan uses.
        step_s: seconds of a step by the plan.
        one_device_s: seconds of a step on the one device that is fastest.
        memory_bytes: on the fullest device of the plan.
        one_device_bytes: on the one device.
        one_device_fits: whether they fit there.
        one_device_pieces: micro-batches in which it takes the mini-batch, accumulating gradients:
            the fewest that fit there.
        longest_compute_s: seconds that the busiest device of the plan computes in a step.
        compute_s: seconds that all its devices compute in a step.
        is_estimated: whether operators were not measured, but taken from data sheets.
        num_sharing: processes of the plan that share the cores of one host; 0 where each has
            devices of its own.
        num_cores: cores that they share.
        on_processes: whether processes on CPUs run it, which lose most to what is in neither.
    """

    num_devices: int
    step_s: float
    one_device_s: float
    memory_bytes: int
    one_device_bytes: int
    one_device_fits: bool
    longest_compute_s: float
    compute_s: float
    is_estimated: bool = False
    num_sharing: int = 0
    num_cores: int = 0
    on_processes: bool = False
    one_device_pieces: int = 1

    @classmethod
    def of(
        cls, evaluation: PlanEvaluation, request: PlanRequest, *, num_cores: int | None = None
    ) -> PlanVerdict:
        """The verdict on a plan.

        Args:
            evaluation: of the plan.
            request: the question that it answers.
            num_cores: of the host on which its CPU processes run, if they do run on this machine.
        """
        kinds = [request.cluster.devices[found.device].kind for found in evaluation.devices]
        on_cpus = kinds.count("cpu")
        is_shared = num_cores is not None and on_cpus > num_cores
        return cls.beside_one(
            request,
            step_s=evaluation.minibatch_s,
            memory_bytes=evaluation.peak_memory_bytes,
            busy_s=[d.busy_s / evaluation.num_minibatches for d in evaluation.devices],
            num_sharing=on_cpus if is_shared else 0,
            num_cores=num_cores or 0,
            on_processes=on_cpus > 0,
        )

    @classmethod
    def beside_one(
        cls, request: PlanRequest, *, busy_s: Sequence[float], **shared: Any
    ) -> PlanVerdict:
        """The verdict on what takes a step of so long, on devices that compute for so long."""
        alone = best_alone(request)
        is_cut = not request.graph.staying and request.num_minibatches == 1
        return cls(
            num_devices=len(busy_s),
            one_device_s=alone.minibatch_s,
            one_device_bytes=alone.peak_memory_bytes,
            one_device_fits=alone.is_feasible,
            one_device_pieces=alone.plan.num_microbatches or 1 if is_cut else 1,
            longest_compute_s=max(busy_s),
            compute_s=sum(busy_s),
            is_estimated=request.is_estimated,
            **shared,
        )

    @property
    def speedup(self) -> float:
        """How many times as fast as one device."""
        return self.one_device_s / self.step_s

    def text(self, max_width: int = 100) -> str:
        """A sentence of so many columns; more where processes share cores."""
        sentences, several = [f"Verdict: {self._predicted()}"], self.num_devices > 1
        if several and self.num_sharing:
            least_s = max(self.step_s, self.compute_s / self.num_cores)
            sentences.append(
                f"Here {self.num_sharing} processes share {count_text(self.num_cores, 'core')}: "
                f"at best {_times(self.one_device_s / least_s)} one process."
            )
        if several and self.on_processes:
            sentences.append(
                f"Y{OWN[1:]} and what processes do beside are in neither: of short steps they are "
                "the larger part, which training tells."
            )
        return wrapped(sentences, max_width)

    def _predicted(self) -> str:
        step, alone = seconds_text(self.step_s), seconds_text(self.one_device_s)
        if self.num_devices == 1:
            return f"one device does it all, {step} a step ({self._how})."
        devices = count_text(self.num_devices, "device")
        own = " of their own" if self.num_sharing else ""
        if not self.one_device_fits:
            return f"{devices}{own} {self._no_room}, {step} a step ({self._how})."
        beside = f"({self._how}: {step} a step, one {alone}{self._in_pieces}), with {self._memory}"
        if self.speedup >= AS_FAST:
            at_best = "at best " if self.on_processes else ""
            return f"{devices}{own} are {at_best}{_times(self.speedup)} as fast as one {beside}."
        slower = "as fast as" if self.speedup > 1 / AS_FAST else "slower than"
        other_s = max(0.0, self.step_s - self.longest_compute_s)
        return (
            f"{devices} are {slower} one {beside}: the busiest computes "
            f"{seconds_text(self.longest_compute_s)} a step, messages and waiting cost "
            f"{seconds_text(other_s)}. Larger batches or layers would change that; 1 device would "
            "do."
        )

    def measured_text(self, took: BatchTimes, max_width: int = 100) -> str:
        """The verdict by what batches took, beside what was predicted of them and of one device.

        One process has the step, the data and the loop as well, and shares its cores with no other
        ranks, but its optimizer has all weights.

        Args:
            took: what they took.
            max_width: columns.
        """
        batch, step = f"{seconds_text(took.batch_s)} a batch", seconds_text(self.step_s)
        if self.num_devices == 1 or took.own_s is None:
            text = f"Measured: {batch} (median of {took.num_batches}), "
            if self.num_devices == 1:
                return wrapped([f"{text}of which operators take {step} ({self._how})."], max_width)
            text += f"{self._how}: {step} without {OWN}; one device, also without, "
            text += f"{seconds_text(self.one_device_s)}."
            text += "" if self.one_device_fits else " One device has no room for the model."
            return wrapped([text], max_width)
        one_s = took.own_s + self.one_device_s
        batch = f"measured: {batch}, median of {took.num_batches}"
        what = f"{self._no_room} ({batch})"
        if self.one_device_fits:
            what = f"{_beside_one(one_s / took.batch_s)} ({batch}; one about {seconds_text(one_s)}"
            what += f"{self._in_pieces}), with {self._memory}"
        text = f"Verdict: {count_text(self.num_devices, 'process')} {what}."
        text += (
            f" Of a batch {seconds_text(took.batch_s - took.own_s)} are in the pipeline "
            f"({self._how}: {step}), {seconds_text(took.own_s)} in {OWN}."
        )
        return wrapped([text], max_width)

    @property
    def _memory(self) -> str:
        return f"{percent_text(self.memory_bytes, self.one_device_bytes)} of its memory"

    @property
    def _in_pieces(self) -> str:
        count = self.one_device_pieces
        return f" in {count} micro-batches, as more does not fit" if count > 1 else ""

    @property
    def _no_room(self) -> str:
        return (
            f"train what one has no room for ({bytes_text(self.one_device_bytes)}): "
            f"{bytes_text(self.memory_bytes)} on the fullest"
        )

    @property
    def _how(self) -> str:
        return "estimated, not measured" if self.is_estimated else "predicted"


def _times(factor: float) -> str:
    return f"{number_text(round(factor, 2))} times"


def _beside_one(gain: float) -> str:
    if gain <= 1 / AS_FAST:
        return f"are slower than one, which would be about {_times(1 / gain)} as fast"
    return f"are about {f'{_times(gain)} ' if gain >= AS_FAST else ''}as fast as one"


def best_alone(request: PlanRequest) -> PlanEvaluation:
    """What the whole model would do on the one device of the cluster that is fastest for it.

    It has the mini-batch whole, or where that does not fit in as few micro-batches as do, with
    their gradients accumulated. Of one graph in chunks it has the chunks, which are what was
    measured.
    """
    kinds = [device.kind for device in request.cluster.devices]
    found = [_alone_on(kinds.index(kind), request) for kind in dict.fromkeys(kinds)]
    return min(found, key=lambda one: (not one.is_feasible, one.step_s))


def _alone_on(device: int, request: PlanRequest) -> PlanEvaluation:
    """The whole model on a device; if it fits with no number of micro-batches, in one piece."""
    stages = (Stage(0, tuple(operator.name for operator in request.graph), (device,)),)
    chunks = request.num_microbatches if request.graph.staying else None
    count = chunks or request.num_minibatches
    asked = [replace(request, num_microbatches=count)]
    if count == 1:
        pieces = (2**power for power in range(1, request.minibatch_size.bit_length()))
        asked += [replace(request, num_microbatches=n, schedule=HOLDS_FEW) for n in pieces]
    plans = [Plan(stages, num_microbatches=one.num_microbatches) for one in asked]
    for plan, one in zip(plans, asked):
        if all(device.fits for device in plan_devices(plan, one)):
            return evaluate_plan(plan, one)
    return evaluate_plan(plans[0], asked[0])
