"""The search: micro-batch sizes, a binary search on the bottleneck, and the choice by step time.

Algorithm 1 of GraphPipe (arXiv 2406.17145, section 5.2) for every micro-batch size. The plan with
the smallest bottleneck is not always the fastest: one with fewer stages on its longest path warms
up and drains sooner. So the search also asks for the shallowest plans at slightly slower
bottlenecks, ranks all it has seen by an estimate of the step, and evaluates the best of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_gpp.planner.evaluate import PlanEvaluation, evaluate_plan
from lightning_gpp.planner.graphpipe.frontier import Cut
from lightning_gpp.planner.graphpipe.partition import Partition, Space
from lightning_gpp.planner.graphpipe.placement import FoundStage, found_stages, plans_of
from lightning_gpp.planner.graphpipe.problem import Problem

PRECISION = 1.015
"""The binary search ends when the limits are this close; then it tries to beat what it found."""

FORWARD_SHARE = 3
"""A forward is about this part of a forward and a backward."""

LEAST_FILL = 0.5
"""In larger models, micro-batches' time that a pipeline is taken to lose at least by filling."""

HOPELESS = 1.15
"""Shallower plans are not sought where the best estimate is this many times the best step."""

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

    def evaluations(self) -> Iterable[PlanEvaluation]:
        """Its plans, evaluated."""
        for plan in plans_of(
            self.problem, self.stages, self.microbatch_size, self.name, is_chain=self.is_chain
        ):
            yield evaluate_plan(plan, self.problem.request)


@dataclass(frozen=True, slots=True)
class Found:
    """Divisions that keep to one limit.

    Attributes:
        seconds_per_sample: of the slowest stage of the fastest of them.
        divisions: their stages.
    """

    seconds_per_sample: float
    divisions: tuple[tuple[FoundStage, ...], ...]


def divide(space: Space, limit_s: float) -> Found | None:
    """The divisions whose stages all keep to a limit per sample; None if there are none."""
    ways = Partition(space, limit_s).ways()
    if not ways:
        return None
    divisions = tuple(tuple(found_stages(way.trace, space, limit_s)) for way in ways)
    slowest_s = min(max(stage.seconds_per_sample for stage in stages) for stages in divisions)
    return Found(slowest_s, divisions)


def lower_bound_s(space: Space) -> float:
    """Seconds per sample that no division can beat: equal shares, or the slowest unit."""
    num_devices = space.usage.num_devices
    sums = [space.rates.least_seconds(crew) for crew in space.crews]
    places = range(len(space.layout.order))
    slowest_s = max(min(s[place + 1] - s[place] for s in sums) for place in places)
    return max(space.work[-1] / num_devices, slowest_s)


def smallest_bottleneck(space: Space, at_most_s: float = math.inf) -> list[Found]:
    """The division with the smallest bottleneck, first, and those that were found on the way.

    Args:
        space: what to divide.
        at_most_s: larger bottlenecks are of no interest.
    """
    low = max(lower_bound_s(space) * (1 - 1e-9), 1e-18)
    if low > at_most_s:
        return []
    found: list[Found] = []
    limit_s = at_most_s if math.isfinite(at_most_s) else low * 1.1
    while not found:
        if (new := divide(space, limit_s)) is not None:
            found.append(new)
        elif limit_s >= at_most_s:
            return []
        else:
            low = limit_s
            limit_s = _next_limit(limit_s, space, at_most_s)
    while found[-1].seconds_per_sample > low * PRECISION:
        middle = math.sqrt(low * found[-1].seconds_per_sample)
        if (new := divide(space, middle)) is not None:
            found.append(new)
        else:
            low = middle
    for _ in range(1000 if space.is_small else 1):
        new = divide(space, found[-1].seconds_per_sample * (1 - 1e-9))
        if new is None:
            break
        found.append(new)
    return found[::-1]


def _next_limit(limit_s: float, space: Space, at_most_s: float) -> float:
    """A larger limit; none at all once a single device with the whole model keeps to it."""
    whole_s = min(space.rates.least_seconds(crew)[-1] for crew in space.crews)
    if limit_s > 4 * whole_s:
        return at_most_s
    return min(limit_s * 1.5, at_most_s)


def candidates(
    problem: Problem, space: Space, best_s: float, name: str, *, is_chain: bool
) -> list[Candidate]:
    """Divisions for one micro-batch size that may beat a step time, the most promising first."""
    minibatch_size = problem.request.minibatch_size
    samples = minibatch_size + (0 if space.is_small else LEAST_FILL * space.rates.microbatch_size)
    found = smallest_bottleneck(space, best_s / samples)
    if not found:
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
                    estimate_step_s(problem, stages, space.rates.microbatch_size),
                    name,
                    is_chain,
                )

    for new in found:
        note(new)
    for factor in SLOWER:
        limit_s = found[0].seconds_per_sample * factor
        shortest_s = min(candidate.estimate_s for candidate in made.values())
        if limit_s * samples > min(best_s, shortest_s) or shortest_s > HOPELESS * best_s:
            break
        if (slower := divide(space, limit_s)) is not None:
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
        estimate_s = estimate_step_s(problem, stages, size)
        limit_s = rate.seconds_per_sample
        yield Candidate(problem, stages, size, limit_s, estimate_s, name, is_chain)


def estimate_step_s(
    problem: Problem, stages: Sequence[FoundStage], microbatch_size: float
) -> float:
    """Seconds of a step: the first micro-batch on its longest way, and a cycle for each other one.

    A cycle is what the slowest stage takes, or longer: a stage cannot begin more micro-batches than
    it may have in flight until the first of them comes back, messages included.
    """
    minibatch_size = problem.request.minibatch_size
    sources = _sources(problem, stages)
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
