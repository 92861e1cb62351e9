"""The gain of a plan over one device, in one sentence."""

from __future__ import annotations

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

AS_FAST = 1.05
"""Gains below this factor are called none: predictions are not closer than that."""


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Measured times of batches.

    Attributes:
        batch_s: their median, from the beginning of one to that of the next.
        num_batches: number of measured batches.
        own_s: median seconds of it that are the user's: the step, the data, the optimizer and the
            loop; None where they cannot be told from the pipeline.
    """

    batch_s: float
    num_batches: int
    own_s: float | None = None


@dataclass(frozen=True, slots=True)
class PlanVerdict:
    """A plan beside one device of the same cluster that runs the whole model.

    Both are predicted from operators and messages alone, without the user's step, the data, the
    optimizer and Lightning's loop, of which short steps consist: :meth:`measured_text` has the
    better verdict where batches could be timed.

    Attributes:
        num_devices: that the plan uses.
        step_s: seconds of a step by the plan.
        one_device_s: seconds of a step on the one device that is fastest.
        memory_bytes: on the device of the plan that needs most.
        one_device_bytes: on the one device.
        one_device_fits: whether they fit there.
        one_device_pieces: micro-batches in which it takes the mini-batch, accumulating gradients:
            the fewest that fit there.
        is_estimated: whether operators were not measured, but taken from data sheets.
        num_cores: of the machine, where more processes of the plan than these share them; else 0.
        on_processes: whether processes on CPUs run it, which lose most to what is not predicted.
    """

    num_devices: int
    step_s: float
    one_device_s: float
    memory_bytes: int
    one_device_bytes: int
    one_device_fits: bool
    is_estimated: bool = False
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
        return cls.beside_one(
            request,
            num_devices=len(kinds),
            step_s=evaluation.minibatch_s,
            memory_bytes=evaluation.peak_memory_bytes,
            num_cores=num_cores if num_cores is not None and on_cpus > num_cores else 0,
            on_processes=on_cpus > 0,
        )

    @classmethod
    def beside_one(cls, request: PlanRequest, **plan: Any) -> PlanVerdict:
        """The verdict on what is known of a plan."""
        alone = best_alone(request)
        is_cut = not request.graph.staying and request.num_minibatches == 1
        return cls(
            one_device_s=alone.minibatch_s,
            one_device_bytes=alone.peak_memory_bytes,
            one_device_fits=alone.is_feasible,
            one_device_pieces=alone.plan.num_microbatches or 1 if is_cut else 1,
            is_estimated=request.is_estimated,
            **plan,
        )

    @property
    def speedup(self) -> float:
        """Speed relative to one device."""
        return self.one_device_s / self.step_s

    def text(self, max_width: int = 100) -> str:
        """The prediction as text."""
        return wrapped([f"Verdict: {self._predicted()}."], max_width)

    def _predicted(self) -> str:
        how = "estimated, not measured" if self.is_estimated else "predicted"
        step, devices = seconds_text(self.step_s), count_text(self.num_devices, "device")
        if self.num_devices == 1:
            return f"one device does it all, {step} a step ({how})"
        if self.num_cores:
            return self.sharing
        if not self.one_device_fits:
            return f"{devices} {self._no_room}, {step} a step ({how})"
        most = AS_FAST * self.num_devices
        if self.speedup > most and self.one_device_pieces == 1 and not self.is_estimated:
            return (
                f"only training tells, as {devices} cannot be {_times(self.speedup)} as fast as "
                "one: the machine was busy while it was measured"
            )
        without = "; your step, data and optimizer not counted" if self.on_processes else ""
        beside = (
            f"({how}: {step} a step, one {seconds_text(self.one_device_s)}{self._in_pieces}"
            f"{without}), with {self._memory}"
        )
        if self.speedup >= AS_FAST:
            at_best = "at best " if self.on_processes else ""
            return f"{devices} are {at_best}{_times(self.speedup)} as fast as one {beside}"
        slower = "as fast as" if self.speedup > 1 / AS_FAST else "slower than"
        return f"{devices} are {slower} one {beside}; larger batches or layers would help"

    def measured_text(self, took: BatchTimes, max_width: int = 100) -> str:
        """The verdict by what batches took.

        One process has the step, the data and the loop as well, and shares its cores with no other
        ranks, but its optimizer has all weights.

        Args:
            took: what they took.
            max_width: columns.
        """
        batch = f"{seconds_text(took.batch_s)} a batch (median of {took.num_batches})"
        who = count_text(self.num_devices, "process")
        if self.num_cores and self.num_devices > 1:
            who += f" that share {count_text(self.num_cores, 'core')}"
        one_s = self.one_device_s + (took.own_s or 0.0)
        gain, pieces = one_s / took.batch_s, self.one_device_pieces
        was_busy = gain > AS_FAST * self.num_devices and pieces == 1  # when costs were measured
        if self.num_devices > 1 and not self.one_device_fits:
            text = f"{who} {self._no_room}, {batch}"
        elif self.num_devices == 1 or took.own_s is None or was_busy:
            text = f"{who}: {batch}"
        else:
            text = (
                f"{who} are {_beside_one(gain)}: {batch}, one process about "
                f"{seconds_text(one_s)}{self._in_pieces}; each needs at most {self._memory}"
            )
        return wrapped([f"Verdict: {text}."], max_width)

    @property
    def sharing(self) -> str:
        """A note for processes that share cores; empty if none do."""
        if not self.num_cores:
            return ""
        return (
            f"{self.num_devices} processes share {count_text(self.num_cores, 'core')}: expect this "
            "to be slower than one process; predictions assume a core per process"
        )

    @property
    def _memory(self) -> str:
        return f"{percent_text(self.memory_bytes, self.one_device_bytes)} of its memory"

    @property
    def _in_pieces(self) -> str:
        count = self.one_device_pieces
        return f" in {count} micro-batches, as larger ones do not fit" if count > 1 else ""

    @property
    def _no_room(self) -> str:
        return (
            f"train what does not fit on one ({bytes_text(self.one_device_bytes)}): at most "
            f"{bytes_text(self.memory_bytes)} on each"
        )


def _times(factor: float) -> str:
    return f"{number_text(round(factor, 2))} times"


def _beside_one(gain: float) -> str:
    if gain <= 1 / AS_FAST:
        return "slower than one"
    return f"about {f'{_times(gain)} ' if gain >= AS_FAST else ''}as fast as one"


def best_alone(request: PlanRequest) -> PlanEvaluation:
    """Evaluates the whole model on the one device of the cluster that is fastest for it.

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
