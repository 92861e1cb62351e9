"""Candidates for one micro-batch size: divisions whose step may be the shortest.

Algorithm 1 of GraphPipe (arXiv 2406.17145, section 5.2) for every micro-batch size. The plan with
the smallest bottleneck is not always the fastest: one with fewer stages on its longest path warms
up and drains sooner. So the search also asks for the shallowest plans at slightly slower
bottlenecks, ranks all it has seen by an estimate of the step, and evaluates the best of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lightning_gpp.planner.evaluate import PlanEvaluation, evaluate_plan
from lightning_gpp.planner.graphpipe.frontier import Cut
from lightning_gpp.planner.graphpipe.least import least_step
from lightning_gpp.planner.graphpipe.limits import Divisions, Found
from lightning_gpp.planner.graphpipe.placement import (
    Devices,
    FoundStage,
    found_stages,
    numbered_stages,
    placements,
    plan_of,
)
from lightning_gpp.planner.graphpipe.problem import Problem
from lightning_gpp.planner.graphpipe.space import Space

LEAST_FILL = 0.5
"""In larger models, micro-batches' time that a pipeline is taken to lose at least by filling."""

HOPELESS = 1.15
"""Estimates of this many times the best step so far are of no interest."""

SLOWER = (1.03, 1.1, 1.3)
"""Limits, as multiples of the smallest bottleneck, at which shallower plans are sought."""


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
) -> Iterator[Candidate]:
    """Stages with their devices given out in different ways.

    Args:
        problem: what they divide.
        stages: the stages in the order of their places.
        microbatch_size: samples of the smallest micro-batch.
        name: of the planner.
        is_chain: whether every stage waits for the one before it.
    """
    estimates = problem.estimates
    numbered = numbered_stages(problem, stages)
    edges = estimates.edges(numbered, is_chain=is_chain)
    for devices in placements(problem, numbered, stages):
        least_s = estimates.least_step_s(numbered, devices, edges, microbatch_size)
        yield Candidate(problem, numbered, devices, microbatch_size, least_s, name, is_chain)


def candidates(
    problem: Problem,
    space: Space,
    best_s: Callable[[], float],
    name: str,
    *,
    is_chain: bool,
    guess: float = 1.0,
) -> Iterator[list[Candidate]]:
    """Divisions for one micro-batch size that may beat a step time, as they are found.

    Args:
        problem: what the space is of.
        space: what to divide.
        best_s: the step to beat; it may become shorter between two lists.
        name: of the planner.
        is_chain: whether every stage waits for the one before it.
        guess: how many times its lower bound the smallest bottleneck may be.
    """
    minibatch_size = problem.request.minibatch_size
    size = space.rates.microbatch_size
    samples = minibatch_size + (0 if space.is_small else LEAST_FILL * size)
    least = least_step(problem, space)
    if least.step_s > HOPELESS * best_s():
        return
    divisions = Divisions(space)
    at_most_s = min(best_s() / samples, least.bottleneck_s(HOPELESS * best_s()))
    best = divisions.with_smallest_bottleneck(at_most_s, guess=guess)
    if best is None:
        return
    seen: set[tuple[FoundStage, ...]] = set()

    def new(found: Found) -> list[Candidate]:
        made: list[Candidate] = []
        for stages in found.divisions:
            if stages not in seen:
                seen.add(stages)
                made += placed(problem, stages, size, name, is_chain=is_chain)
        return sorted(made, key=lambda candidate: candidate.least_s)

    for found in divisions.found[::-1]:
        yield new(found)
    for factor in SLOWER:
        limit_s = best.seconds_per_sample * factor
        if limit_s * samples > best_s():
            break
        if (slower := divisions.at(limit_s)) is not None:
            yield new(slower)


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
