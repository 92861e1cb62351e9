"""A stage that a search found."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpp.planner.graphpipe.divide.frontier import Cut, Way
from lightning_gpp.planner.graphpipe.place.draft import Units
from lightning_gpp.planner.graphpipe.space.crew import Crew, Interval
from lightning_gpp.planner.graphpipe.space.space import Space
from lightning_gpp.planner.step_time.least_step import ROUNDING


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
