"""What every device of a plan does during a step: when it computes, when it waits, and for what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation
from lightning_gpp.planner.step_time.pipeline_run import pipeline_run

Work = tuple[float, bool, float]
"""When a forward or a backward starts, whether it is a forward, and its seconds."""


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """How one device spends a step; all but ``device`` and ``stages`` are seconds.

    Attributes:
        device: its index in the cluster.
        stages: ids of its stages.
        compute_s: forwards and backwards.
        reduce_s: summing the gradients of replicas behind the last backward.
        fill_s: waiting for its first input (warm-up).
        inputs_s: waiting for activations of the stages before it, after that.
        gradients_s: waiting for gradients of the stages after it.
        end_s: idle after its own work, until the slowest device is done (drain).
    """

    device: int
    stages: tuple[int, ...]
    compute_s: float
    reduce_s: float
    fill_s: float
    inputs_s: float
    gradients_s: float
    end_s: float

    @property
    def wait_s(self) -> float:
        """Seconds without work."""
        return self.fill_s + self.inputs_s + self.gradients_s + self.end_s


def device_times(evaluation: PlanEvaluation, request: PlanRequest) -> tuple[DeviceTime, ...]:
    """How every device that a plan uses spends a step, in the order of the devices.

    Played as :func:`~lightning_gpp.planner.step_time.evaluate.evaluate_plan` plays it.
    """
    run = pipeline_run(evaluation.plan, request)
    timing = run.play()
    work: dict[int, list[Work]] = {found.device: [] for found in evaluation.devices}
    for found, replicas in zip(evaluation.stages, timing.start_s):
        for device, replica, starts in zip(found.stage.devices, found.replicas, replicas):
            for step, start_s in zip(run.steps[found.stage.id], starts):
                own_s = replica.forward_s if step >= 0 else replica.backward_s
                work[device].append((start_s, step >= 0, own_s))
    return tuple(_device_time(device, evaluation, own) for device, own in work.items())


def _device_time(device: int, evaluation: PlanEvaluation, work: Sequence[Work]) -> DeviceTime:
    own = [found for found in evaluation.stages if device in found.stage.devices]
    waits = {"fill": 0.0, "inputs": 0.0, "gradients": 0.0}
    clock_s = compute_s = 0.0
    for number, (start_s, is_forward, duration_s) in enumerate(sorted(work, key=itemgetter(0))):
        reason = "fill" if number == 0 else "inputs" if is_forward else "gradients"
        waits[reason] += max(0.0, start_s - clock_s)
        clock_s = start_s + duration_s
        compute_s += duration_s
    reduce_s = sum(found.reduce_s for found in own)
    return DeviceTime(
        device,
        tuple(found.stage.id for found in own),
        compute_s=compute_s,
        reduce_s=reduce_s,
        fill_s=waits["fill"],
        inputs_s=waits["inputs"],
        gradients_s=waits["gradients"],
        end_s=max(0.0, evaluation.step_s - clock_s - reduce_s),
    )
