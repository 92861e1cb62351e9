"""Stages that a search found, and the devices for them.

Devices are given out in the order of the stages, so that those of a branch are neighbours in the
cluster and what they exchange stays in a host; a second way gives the stages with most replicas the
first choice, so that their groups do not lie across hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.graphpipe.divide.frontier import Cut, Way
from lightning_gpp.planner.graphpipe.place.draft import Draft, DraftStage, Units
from lightning_gpp.planner.graphpipe.place.homes import given_out
from lightning_gpp.planner.graphpipe.space.crew import Crew, Interval
from lightning_gpp.planner.graphpipe.space.space import Space


@dataclass(frozen=True, slots=True)
class FoundStage:
    """A stage before it has devices.

    Attributes:
        interval: places of its units in the line.
        crew: its devices.
        recompute: whether it runs its forward twice.
        seconds_per_sample: as the search took it.
    """

    interval: Interval
    crew: Crew
    recompute: bool
    seconds_per_sample: float

    @property
    def units(self) -> Units:
        """Its units as a set."""
        start, stop = self.interval
        return (1 << stop) - (1 << start)


def found_stages(way: Way, space: Space, limit_s: float) -> tuple[FoundStage, ...]:
    """The stages of a way, those of the first places first."""
    return tuple(_found_stage(cut, space, limit_s) for cut in way.cuts())


def _found_stage(cut: Cut, space: Space, limit_s: float) -> FoundStage:
    """A stage, recomputed where it is too slow or does not fit otherwise."""
    rate = space.rates.of(cut.crew)(cut.interval)
    is_fast = rate.seconds_per_sample <= limit_s * (1 + ROUNDING)
    if is_fast and space.in_flight(cut.units, cut.crew) <= rate.most_in_flight:
        return FoundStage(cut.interval, cut.crew, False, rate.seconds_per_sample)
    return FoundStage(cut.interval, cut.crew, True, rate.recomputed_seconds_per_sample)


def placed(
    stages: Sequence[FoundStage], microbatch_size: float, request: PlanRequest
) -> list[Draft]:
    """Stages with their devices given out in different ways.

    Args:
        stages: the stages in the order of their places.
        microbatch_size: samples of the smallest micro-batch, of which replicas may share one.
        request: the question.
    """
    parts = max(-(-stage.crew.num_replicas // stage.crew.multiple) for stage in stages)
    count = round(request.minibatch_size / microbatch_size) * parts
    by_size = sorted(range(len(stages)), key=lambda number: -stages[number].crew.num_replicas)
    kinds = [device.kind for device in request.cluster.devices]
    named = request.cluster.kinds
    wanted = [(named[one.crew.kind], one.crew.num_replicas) for one in stages]
    ways = given_out(wanted, kinds), given_out(wanted, kinds, by_size)
    return [
        Draft(
            tuple(
                DraftStage(one.units, own, parts * one.crew.multiple, one.recompute)
                for one, own in zip(stages, devices)
            ),
            count,
        ).reduced()
        for devices in dict.fromkeys(way for way in ways if way is not None)
    ]
