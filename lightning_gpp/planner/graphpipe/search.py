"""Candidates for one micro-batch size: divisions whose step may be the shortest.

Algorithm 1 of GraphPipe (arXiv 2406.17145, section 5.2) for every micro-batch size. The plan with
the smallest bottleneck is not always the fastest: one with fewer stages on its longest path warms
up and drains sooner. So the search also asks for the shallowest plans at slightly slower
bottlenecks, ranks all it has seen by an estimate of the step, and evaluates the best of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_gpp.planner.evaluate import PlanEvaluation, evaluate_plan
from lightning_gpp.planner.graphpipe.frontier import Cut
from lightning_gpp.planner.graphpipe.least import least_step
from lightning_gpp.planner.graphpipe.limits import Divisions, Found
from lightning_gpp.planner.graphpipe.placement import FoundStage, found_stages, plans_of
from lightning_gpp.planner.graphpipe.problem import Problem
from lightning_gpp.planner.graphpipe.space import Space

FORWARD_SHARE = 3
"""A forward is about this part of a forward and a backward."""

LEAST_FILL = 0.5
"""In larger models, micro-batches' time that a pipeline is taken to lose at least by filling."""

HOPELESS = 1.15
"""Estimates of this many times the best step so far are of no interest."""

SLOWER = (1.03, 1.1, 1.3)
"""Limits, as multiples of the smallest bottleneck, at which shallower plans are sought."""


@dataclass(frozen=True)
class Candidate:
    """Stages that a search found.

    Attributes:
        problem: what was searched.
        stages: the stages.
        microbatch_size: samples of a micro-batch.
        seconds_per_sample: of the slowest stage, as the search took it.
        estimate_s: seconds of a step, estimated.
        name: of the planner.
        is_chain: whether every stage waits for the one before it.
    """

    problem: Problem
    stages: tuple[FoundStage, ...]
    microbatch_size: float
    seconds_per_sample: float
    estimate_s: float
    name: str
    is_chain: bool

    @property
    def num_played(self) -> int:
        """Micro-batches of its stages in a step."""
        units = self.problem.request.minibatch_size / self.microbatch_size
        return round(sum(units / stage.crew.multiple for stage in self.stages))

    @property
    def least_s(self) -> float:
        """Seconds that no plan of it beats: what a stage computes, and the sum of its gradients.

        Messages do not count: the search takes them to go over the slowest link.
        """
        minibatch_size = self.problem.request.minibatch_size
        least_s = 0.0
        for stage in self.stages:
            size = self.microbatch_size * stage.crew.multiple
            busy_s = stage.seconds_per_sample * size - stage.reduce_s * size / minibatch_size
            is_computing = busy_s > stage.message_s * (1 + 1e-9)
            compute_s = busy_s * minibatch_size / size if is_computing else 0.0
            least_s = max(least_s, compute_s + stage.reduce_s)
        return least_s

    def evaluations(self) -> Iterable[PlanEvaluation]:
        """Its plans, evaluated."""
        for plan in plans_of(
            self.problem, self.stages, self.microbatch_size, self.name, is_chain=self.is_chain
        ):
            yield evaluate_plan(plan, self.problem.request)


def candidates(
    problem: Problem, space: Space, best_s: float, name: str, *, is_chain: bool, guess: float = 1.0
) -> list[Candidate]:
    """Divisions for one micro-batch size that may beat a step time, the most promising first.

    Args:
        problem: what the space is of.
        space: what to divide.
        best_s: the step to beat.
        name: of the planner.
        is_chain: whether every stage waits for the one before it.
        guess: how many times its lower bound the smallest bottleneck may be.
    """
    minibatch_size = problem.request.minibatch_size
    samples = minibatch_size + (0 if space.is_small else LEAST_FILL * space.rates.microbatch_size)
    least = least_step(problem, space)
    if least.step_s > HOPELESS * best_s:
        return []
    divisions = Divisions(space)
    at_most_s = min(best_s / samples, least.bottleneck_s(HOPELESS * best_s))
    best = divisions.with_smallest_bottleneck(at_most_s, guess=guess)
    if best is None:
        return []
    made: dict[tuple[FoundStage, ...], Candidate] = {}

    def note(new: Found) -> None:
        for stages in new.divisions:
            if stages not in made:
                made[stages] = Candidate(
                    problem,
                    stages,
                    space.rates.microbatch_size,
                    max(stage.seconds_per_sample for stage in stages),
                    estimate_step_s(
                        problem, stages, space.rates.microbatch_size, is_chain=is_chain
                    ),
                    name,
                    is_chain,
                )

    for new in divisions.found[::-1]:
        note(new)
    for factor in SLOWER:
        limit_s = best.seconds_per_sample * factor
        shortest_s = min(candidate.estimate_s for candidate in made.values())
        if limit_s * samples > min(best_s, shortest_s) or shortest_s > HOPELESS * best_s:
            break
        if (slower := divisions.at(limit_s)) is not None:
            note(slower)
    return sorted(made.values(), key=lambda candidate: candidate.estimate_s)


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
        stages = tuple(found_stages(cut, space, rate.seconds_per_sample))
        size = space.rates.microbatch_size
        estimate_s = estimate_step_s(problem, stages, size, is_chain=is_chain)
        limit_s = rate.seconds_per_sample
        yield Candidate(problem, stages, size, limit_s, estimate_s, name, is_chain)


def estimate_step_s(
    problem: Problem, stages: Sequence[FoundStage], microbatch_size: float, *, is_chain: bool
) -> float:
    """Seconds of a step: the first micro-batch on its longest way, and a cycle for each other one.

    A cycle is what the slowest stage takes, or longer: a stage cannot begin more micro-batches than
    it may have in flight until the first of them comes back, messages included.
    """
    minibatch_size = problem.request.minibatch_size
    sources = _sources(problem, stages)
    if is_chain:
        for index in range(1, len(stages)):
            sources[index].add(index - 1)
    targets: list[set[int]] = [set() for _ in stages]
    for target, before in enumerate(sources):
        for source in before:
            targets[source].add(target)
    own_s = [
        stage.seconds_per_sample * microbatch_size * stage.crew.multiple
        - stage.reduce_s * microbatch_size * stage.crew.multiple / minibatch_size
        + stage.message_s
        for stage in stages
    ]
    until_s, back_s = _longest_ways(own_s, sources), _longest_ways(own_s, targets)
    cycle_s = max(stage.seconds_per_sample for stage in stages)
    for stage, way_s in zip(stages, back_s):
        samples = microbatch_size * stage.units
        if samples < minibatch_size:
            cycle_s = max(cycle_s, way_s / samples)
    return max(
        (until_s[index] - own_s[index]) / FORWARD_SHARE
        + back_s[index]
        + stage.reduce_s
        + (minibatch_size - microbatch_size * stage.crew.multiple) * cycle_s
        for index, stage in enumerate(stages)
    )


def _sources(problem: Problem, stages: Sequence[FoundStage]) -> list[set[int]]:
    """Stages that each of some stages reads from."""
    home = {place: index for index, stage in enumerate(stages) for place in stage.places}
    place = problem.layout.place
    sources: list[set[int]] = [set() for _ in stages]
    for unit, before in enumerate(problem.units.predecessors):
        target = home[place[unit]]
        sources[target].update({home[place[source]] for source in before} - {target})
    return sources


def _longest_ways(own_s: Sequence[float], neighbours: Sequence[set[int]]) -> list[float]:
    """Seconds of the longest way through neighbours, each stage included."""
    found: dict[int, float] = {}

    def way(index: int) -> float:
        if index not in found:
            found[index] = own_s[index] + max(map(way, neighbours[index]), default=0.0)
        return found[index]

    return [way(index) for index in range(len(own_s))]
