"""Choosing among candidate plans by what they would do."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.evaluate import PlanEvaluation, evaluate_plan
from lightning_gpp.planner.pipeline_run import num_microbatches
from lightning_gpp.planner.plan import Plan
from lightning_gpp.planner.stage_costs import stage_compute
from lightning_gpp.planner.units_of_measure import bytes_text


class BestPlan:
    """Keeps the best of the plans that it is shown: shortest step first, then least memory.

    Attributes:
        request: the question.
        evaluation: of the best plan that fits into memory, None while there is none.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.evaluation: PlanEvaluation | None = None
        self._closest: tuple[float, PlanEvaluation] | None = None

    def show(self, plans: Iterable[Plan]) -> bool:
        """Judges plans; says whether any of them fits into memory.

        Plans whose computing alone takes longer than the best step are not played.
        """
        fits = False
        for plan in plans:
            if self.evaluation and computing_s(plan, self.request) >= self.evaluation.step_s:
                fits = True  # whether it does makes no difference any more
                continue
            found = evaluate_plan(plan, self.request)
            if found.is_feasible:
                fits = True
                if self.evaluation is None or _rank(found) < _rank(self.evaluation):
                    self.evaluation = found
            else:
                self._note(found)
        return fits

    def plan(self, planner: str) -> Plan:
        """The best plan.

        Raises:
            ValueError: none fits into memory; the text says how much would be enough.
        """
        if self.evaluation is not None:
            return self.evaluation.plan
        if self._closest is None:
            raise ValueError(
                f"{planner} found no plan for {self.request.num_devices} devices and mini-batches "
                f"of {self.request.minibatch_size} samples: no division passes its memory filter"
            )
        _, closest = self._closest
        worst = max(closest.devices, key=lambda device: device.memory_bytes)
        raise ValueError(
            f"no plan of {planner} fits into memory: the closest needs "
            f"{bytes_text(worst.memory_bytes)} ({worst.memory_bytes} bytes) on device "
            f"{worst.device}, which has {bytes_text(worst.limit_bytes or 0)}; use more devices, "
            "devices with more memory, or smaller mini-batches"
        )

    def _note(self, found: PlanEvaluation) -> None:
        excess = max(
            device.memory_bytes / device.limit_bytes
            for device in found.devices
            if device.limit_bytes is not None
        )
        if self._closest is None or excess < self._closest[0]:
            self._closest = (excess, found)


def _rank(found: PlanEvaluation) -> tuple[float, int]:
    return found.step_s, found.peak_memory_bytes


def computing_s(plan: Plan, request: PlanRequest) -> float:
    """Seconds that the busiest stage computes in a step; no step is shorter.

    Raises:
        ValueError: the plan has no number of micro-batches.
    """
    unit_size = request.minibatch_size / num_microbatches(plan, request)
    slowest_s = 0.0
    for stage in plan.stages:
        compute = stage_compute(request, stage, unit_size * stage.replica_multiple)
        per_sample_s = (compute.forward_s + compute.backward_s) / (
            unit_size * stage.microbatch_multiple
        )
        slowest_s = max(slowest_s, per_sample_s * request.minibatch_size)
    return slowest_s
