"""Candidates: stages that a search found, on devices, and what their step takes at least."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.graphpipe.candidates.found_stage import FoundStage
from lightning_gpp.planner.graphpipe.candidates.placement import (
    found_stages,
    numbered_stages,
    placements,
    plan_of,
)
from lightning_gpp.planner.graphpipe.divide.frontier import Cut
from lightning_gpp.planner.graphpipe.problem import Problem
from lightning_gpp.planner.graphpipe.space.space import Space
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_plan, least_step_s


@dataclass(frozen=True, eq=False)
class Candidate:
    """Stages that a search found, on devices.

    Attributes:
        plan: the plan.
        request: the question.
        least_s: seconds that no step of it beats.
    """

    plan: Plan
    request: PlanRequest
    least_s: float

    def evaluation(self) -> PlanEvaluation:
        """Its plan, evaluated."""
        return evaluate_plan(self.plan, self.request)


def placed(
    problem: Problem,
    stages: Sequence[FoundStage],
    microbatch_size: float,
    name: str,
    *,
    is_chain: bool,
    enough_s: float = math.inf,
) -> Iterator[Candidate]:
    """Stages with their devices given out in different ways.

    Args:
        problem: what they divide.
        stages: the stages in the order of their places.
        microbatch_size: samples of the smallest micro-batch.
        name: of the planner.
        is_chain: whether every stage waits for the one before it.
        enough_s: by how much a step takes longer than this is of no interest.
    """
    request = problem.request
    numbered = numbered_stages(problem, stages)
    computes_s = request.minibatch_size * max(stage.compute_s_per_sample for stage in stages)
    for devices in placements(problem, numbered, stages):
        plan = plan_of(problem, numbered, devices, microbatch_size, name, is_chain=is_chain)
        if computes_s > enough_s:
            yield Candidate(plan, request, computes_s)
            return
        yield Candidate(plan, request, least_step_s(plan, request))


def data_parallel(
    problem: Problem, space: Space, name: str, *, is_chain: bool
) -> Iterator[Candidate]:
    """The whole model as one stage on all devices of a kind, where that fits: nothing to fill."""
    largest = {crew.kind: crew for crew in space.crews}
    for crew in largest.values():
        units = crew.multiple * (2 if crew.num_replicas > 1 else 1)
        interval = space.layout.root.interval
        rate = space.rates((interval,), crew)
        if space.in_flight(units, crew) > rate.most_in_flight:
            continue
        cut = Cut((interval,), crew, units, None)
        stages = found_stages(cut, space, rate.seconds_per_sample)
        size = space.rates.microbatch_size
        yield from placed(problem, stages, size, name, is_chain=is_chain)
