"""Candidates: stages that a search found, on devices, and what their step takes at least."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_gpp.planner.graphpipe.candidates.found_stage import FoundStage
from lightning_gpp.planner.graphpipe.candidates.placement import (
    Devices,
    found_stages,
    numbered_stages,
    placements,
    plan_of,
)
from lightning_gpp.planner.graphpipe.divide.frontier import Cut
from lightning_gpp.planner.graphpipe.problem import Problem
from lightning_gpp.planner.graphpipe.space.space import Space
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_plan


@dataclass(frozen=True, eq=False)
class Candidate:
    """Stages that a search found, on devices.

    Attributes:
        problem: what was searched.
        stages: the stages as they are numbered.
        devices: of every stage.
        microbatch_size: samples of the smallest micro-batch.
        least_s: seconds that no step of it beats.
        name: of the planner.
        is_chain: whether every stage waits for the one before it.
    """

    problem: Problem
    stages: Sequence[FoundStage]
    devices: Sequence[Devices]
    microbatch_size: float
    least_s: float
    name: str
    is_chain: bool

    def evaluation(self) -> PlanEvaluation:
        """Its plan, evaluated."""
        plan = plan_of(
            self.problem,
            self.stages,
            self.devices,
            self.microbatch_size,
            self.name,
            is_chain=self.is_chain,
        )
        return evaluate_plan(plan, self.problem.request)


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
    estimates = problem.estimates
    numbered = numbered_stages(problem, stages)
    ways = placements(problem, numbered, stages)
    least_s = estimates.computes_s(stages, microbatch_size)
    if least_s > enough_s:
        yield Candidate(problem, numbered, ways[0], microbatch_size, least_s, name, is_chain)
        return
    edges = estimates.edges(numbered, is_chain=is_chain)
    for devices in ways:
        least_s = estimates.least_step_s(numbered, devices, edges, microbatch_size, enough_s)
        yield Candidate(problem, numbered, devices, microbatch_size, least_s, name, is_chain)


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
