"""The best of the candidate plans of a published planner, by what they would do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from lightning_gpp.common.units_of_measure import bytes_text
from lightning_gpp.planner.base import HOLD_FEWER, HOLDS_FEW, DoesNotFitError, PlanRequest
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.plan.plan_graph import check_cuts
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_below, plan_devices
from lightning_gpp.planner.step_time.pipeline_run import PipelineRun

WITHOUT_REPLICAS = ", without replicas"
"""Behind the name of a planner whose plans with replicas cannot run."""


class BestPlan:
    """Keeps the best of the plans that it is shown: shortest step first, then least memory.

    Published planners do not ask whether what crosses to replicas can be cut by samples; plans
    where it cannot are refused.

    Attributes:
        request: the question.
        evaluation: of the best plan that can run and fits into memory, None while there is none.
        refusal: why a plan with replicas cannot run; empty while none was refused.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.evaluation: PlanEvaluation | None = None
        self.refusal = ""
        self._closest: tuple[float, PlanEvaluation] | None = None
        self._fits_with_fewer = False

    def show(self, plans: Iterable[Plan]) -> bool:
        """Judges plans; says whether any of them fits into memory.

        Plans whose computing alone takes longer than the best step are not played.
        """
        fits, request = False, self.request
        for plan in plans:
            best, run = self.evaluation, PipelineRun(plan, request)
            if best is not None and run.busiest_s() >= best.step_s:
                fits = True  # whether it does makes no difference any more
                continue
            try:
                check_cuts(run.graph, request.graph)
            except ValueError as error:
                self.refusal = str(error)
                continue
            found = evaluate_below(plan, request, best.step_s if best else math.inf)
            if found is not None and not found.is_feasible:
                self._note(found)
                continue
            fits = True
            if found is not None and (best is None or found.rank < best.rank):
                self.evaluation = found
        return fits

    def plan(self, planner: str) -> Plan:
        """The best plan.

        Its ``planner`` says where plans with replicas were refused and it has none.

        Raises:
            DoesNotFitError: none fits into memory; the text says how much would be enough.
            ValueError: none can run.
        """
        if self.evaluation is not None:
            plan = self.evaluation.plan
            has_replicas = any(stage.num_replicas > 1 for stage in plan.stages)
            if self.refusal and not has_replicas:
                return replace(plan, planner=plan.planner + WITHOUT_REPLICAS)
            return plan
        if self._closest is None:
            raise ValueError(
                f"{planner} found no plan for {self.request.num_devices} devices and mini-batches "
                f"of {self.request.minibatch_size} samples: "
                + (self.refusal or "no division keeps to its rules (memory, replicas)")
            )
        _, closest = self._closest
        worst = max(closest.devices, key=lambda device: device.memory_bytes)
        raise DoesNotFitError(
            f"no plan of {planner} fits into memory: the closest needs "
            f"{bytes_text(worst.memory_bytes)} ({worst.memory_bytes} bytes) on device "
            f"{worst.device}, which has {bytes_text(worst.limit_bytes or 0)}; use more devices, "
            "devices with more memory, or smaller mini-batches"
            + (f"; {HOLD_FEWER}" if self._fits_with_fewer else "")
        )

    def _note(self, found: PlanEvaluation) -> None:
        """Keeps what there is to say of a plan that does not fit."""
        if self.request.holds_all and not self._fits_with_fewer:
            with_few = replace(self.request, schedule=HOLDS_FEW)
            devices = plan_devices(found.plan, with_few)
            self._fits_with_fewer = all(device.fits for device in devices)
        excess = max(
            device.memory_bytes / device.limit_bytes
            for device in found.devices
            if device.limit_bytes is not None
        )
        if self._closest is None or excess < self._closest[0]:
            self._closest = (excess, found)


def best_plan(
    request: PlanRequest, planner: str, show: Callable[[BestPlan, PlanRequest], None]
) -> Plan:
    """The best plan of a published planner.

    Where plans with replicas are refused, those that it makes without any are candidates, too.

    Args:
        request: the question.
        planner: its name.
        show: shows the planner's plans for a question to a :class:`BestPlan`.

    Raises:
        ValueError: none of its plans can run and fits into memory.
    """
    best = BestPlan(request)
    show(best, request)
    if best.refusal:
        show(best, replace(request, max_replicas=1))
    return best.plan(planner)


def refusal_notes(plan: Plan) -> tuple[str, ...]:
    """What to know of a plan of which :class:`BestPlan` says that it is without replicas."""
    if not plan.planner.endswith(WITHOUT_REPLICAS):
        return ()
    planner = plan.planner.removesuffix(WITHOUT_REPLICAS)
    return (
        f"plans of {planner} with replicas cannot run: replicas would have to exchange values that "
        "cannot be cut by samples; this is its best plan without replicas",
    )


def uniform_plans(
    request: PlanRequest,
    stages: Sequence[Stage],
    microbatch_size: float,
    planner: str,
) -> Iterator[Plan]:
    """The two ways to run replicated stages with micro-batches of one size.

    Replicas can *take turns*, each with whole micro-batches (as PipeDream and Piper do), or *share*
    every micro-batch (as the runtime does that GraphPipe's authors ran them on). Where no stage has
    replicas, both are the same plan. A way that does not divide evenly is left out.

    Args:
        request: the mini-batch.
        stages: in topological order, with any multiples.
        microbatch_size: in samples.
        planner: its name.
    """
    most = max(len(stage.devices) for stage in stages)
    for shares in dict.fromkeys((1, most)):
        unit_size = microbatch_size / shares
        count = round(request.minibatch_size / unit_size)
        multiples = [len(stage.devices) if shares == 1 else most for stage in stages]
        if unit_size < 1 or any(count % multiple for multiple in multiples):
            continue
        yield Plan(
            tuple(
                replace(stage, microbatch_multiple=multiple)
                for stage, multiple in zip(stages, multiples)
            ),
            planner,
            num_microbatches=count,
            is_chain=True,
        )
