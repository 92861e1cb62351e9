"""Stages that a search found, as a plan: their order, and which devices they are on.

Devices are given out depth first, so that the stages of a branch are neighbours in the cluster and
what they exchange stays in a host; a second way gives the stages with most replicas the first
choice, so that their groups do not lie across hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_gpp.planner.graphpipe.candidates.found_stage import FoundStage
from lightning_gpp.planner.graphpipe.divide.frontier import Trace, collect_cuts
from lightning_gpp.planner.graphpipe.problem import Problem
from lightning_gpp.planner.graphpipe.space.contents import Intervals
from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.rates import Rates
from lightning_gpp.planner.graphpipe.space.space import Space
from lightning_gpp.planner.graphpipe.tolerances import SECONDS
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.units.dag import topological_order

Devices = tuple[int, ...]


def found_stages(trace: Trace | None, space: Space, limit_s: float) -> list[FoundStage]:
    """The stages of a way (its trace), those of the first places first."""
    stages = []
    for cut, shift in collect_cuts(trace):
        rate = space.rates(cut.intervals, cut.crew)
        recompute = not (
            rate.seconds_per_sample <= limit_s * (1 + SECONDS)
            and space.in_flight(cut.units, cut.crew) <= rate.most_in_flight
        )
        stage = found_stage(space.rates, cut.intervals, cut.crew, cut.units, recompute=recompute)
        if shift:
            stage = replace(stage, places=tuple(place + shift for place in stage.places))
        stages.append(stage)
    return sorted(stages, key=lambda stage: stage.places)


def found_stage(
    rates: Rates, intervals: Intervals, crew: Crew, units: int, *, recompute: bool
) -> FoundStage:
    """A stage of some intervals of places.

    Args:
        rates: what stages take at the micro-batch size in question.
        intervals: its places.
        crew: its devices.
        units: its smallest micro-batches in flight.
        recompute: whether it runs its forward twice.
    """
    own = rates.of(crew)
    rate = own(intervals)
    return FoundStage(
        tuple(place for start, stop in intervals for place in range(start, stop)),
        crew,
        units,
        recompute,
        rate.recomputed_seconds_per_sample if recompute else rate.seconds_per_sample,
        own.compute_s(intervals, recompute=recompute) / (rates.microbatch_size * crew.multiple),
    )


def plan_of(
    problem: Problem,
    numbered: Sequence[FoundStage],
    devices: Sequence[Devices],
    microbatch_size: float,
    name: str,
    *,
    is_chain: bool,
) -> Plan:
    """The plan of some stages.

    Args:
        problem: what they divide.
        numbered: the stages as they are numbered.
        devices: of every stage.
        microbatch_size: samples of the smallest micro-batch of the search.
        name: of the planner.
        is_chain: whether every stage waits for the one before it.
    """
    most = smallest_parts(numbered)
    count = round(problem.request.minibatch_size / microbatch_size) * most
    position = {operator.name: place for place, operator in enumerate(problem.request.graph)}
    made = []
    for number, found in enumerate(numbered):
        units = [problem.layout.order[place] for place in found.places]
        names = [name for unit in units for name in problem.units.operators[unit]]
        operators = tuple(sorted(names, key=position.__getitem__))
        made.append(
            Stage(number, operators, devices[number], most * found.crew.multiple, found.recompute)
        )
    return Plan(tuple(made), name, count, is_chain)


def smallest_parts(stages: Sequence[FoundStage]) -> int:
    """Parts that a smallest micro-batch of the search has for replicas to share it."""
    return max(-(-stage.crew.num_replicas // stage.crew.multiple) for stage in stages)


def numbered_stages(problem: Problem, stages: Sequence[FoundStage]) -> list[FoundStage]:
    """The stages in topological order, the one with the loss last."""
    last = min(
        range(len(stages)),
        key=lambda index: (stages[index].units // stages[index].crew.multiple, -index),
    )
    order = [index for index in range(len(stages)) if index != last] + [last]
    rank = {index: number for number, index in enumerate(order)}
    place = problem.layout.place
    home = {p: rank[index] for index, stage in enumerate(stages) for p in stage.places}
    successors: dict[int, set[int]] = {
        number: {len(stages) - 1} for number in range(len(stages) - 1)
    }
    successors[len(stages) - 1] = set()
    for unit, sources in enumerate(problem.units.predecessors):
        target = home[place[unit]]
        for source in sources:
            if home[place[source]] != target:
                successors[home[place[source]]].add(target)
    return [stages[order[number]] for number in topological_order(successors)]


def placements(
    problem: Problem, numbered: Sequence[FoundStage], depth_first: Sequence[FoundStage]
) -> list[list[Devices]]:
    """Devices of the numbered stages, in different ways."""
    first = _given_out(problem, numbered, depth_first)
    if len({stage.crew.num_replicas for stage in numbered}) == 1:
        return [first]
    by_size = sorted(depth_first, key=lambda stage: -stage.crew.num_replicas)
    second = _given_out(problem, numbered, by_size)
    return [first] if first == second else [first, second]


def _given_out(
    problem: Problem, numbered: Sequence[FoundStage], turns: Sequence[FoundStage]
) -> list[Devices]:
    cluster = problem.request.cluster
    free = {
        kind: [i for i, device in enumerate(cluster.devices) if device.kind == name]
        for kind, name in enumerate(cluster.kinds)
    }
    devices = {}
    for stage in turns:
        own = free[stage.crew.kind]
        devices[stage.places] = tuple(own[: stage.crew.num_replicas])
        del own[: stage.crew.num_replicas]
    return [devices[stage.places] for stage in numbered]
