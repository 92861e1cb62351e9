"""Keeps the best of a published planner's candidate plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from lightning_gpp.planner.base import DoesNotFitError, PlanRequest, does_not_fit
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.plan.plan_graph import check_cuts
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_below
from lightning_gpp.planner.step_time.pipeline_run import PipelineRun


class BestPlan:
    """Keeps the plan with the shortest step, and among equals that with the least memory.

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
                continue
            fits = True
            if found is not None and (best is None or found.rank < best.rank):
                self.evaluation = found
        return fits


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
        DoesNotFitError: none of its plans can run and fits into memory.
    """
    best = BestPlan(request)
    show(best, request)
    if best.refusal:
        show(best, replace(request, max_replicas=1))
    if best.evaluation is None:
        raise DoesNotFitError(best.refusal or does_not_fit(request, f"no plan of {planner} fits"))
    return best.evaluation.plan


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
