"""What a division of a space takes at least, about, before any has been found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gpp.planner.graphpipe.problem import Problem
from lightning_gpp.planner.graphpipe.space.load import columns_min
from lightning_gpp.planner.graphpipe.space.space import Space


@dataclass(frozen=True, slots=True)
class LeastStep:
    """Lower bounds of a step in one space, taken as a fill and cycles.

    A step is a fill, the first micro-batch on its way through all units that depend on each other,
    and then a cycle of the slowest stage for every other micro-batch. Where the slowest stage is
    beside the longest way, or far from its end, a step may be a little shorter than that.

    Attributes:
        fill_s: seconds of the longest way of the first micro-batch, on the fastest devices.
        samples: samples of the other micro-batches, where they are the largest.
        step_s: the least step. More replicas make the fill shorter and, as they are less
            efficient, the cycles longer; here every unit has the best number for itself.
    """

    fill_s: float
    samples: float
    step_s: float

    def bottleneck_s(self, step_s: float) -> float:
        """Seconds per sample of the slowest stage above which every step is longer."""
        return (step_s - self.fill_s) / self.samples if self.samples > 0 else float("inf")


def least_step(problem: Problem, space: Space) -> LeastStep:
    """The lower bounds of a space."""
    rates, crews = space.rates, space.crews
    samples = problem.request.minibatch_size - rates.microbatch_size * max(
        crew.multiple for crew in crews
    )
    fastest = columns_min([rates.of(crew).each for crew in crews])
    way = _longest_way(problem.sources, fastest)
    rows = []
    for crew in crews:
        share = samples * crew.num_replicas / space.usage.num_devices
        own = rates.of(crew)
        row = [share * work_s for work_s in own.least_each]
        for place in way:
            row[place] += own.each[place]
        rows.append(row)
    fill_s = sum(fastest[place] for place in way)
    step_s = max(sum(columns_min(rows)), fill_s + samples * space.load.lower_bound_s)
    return LeastStep(fill_s, samples, step_s)


def _longest_way(sources: Sequence[Sequence[int]], seconds: Sequence[float]) -> list[int]:
    """The places on the longest way through units that depend on each other, the last one first.

    Args:
        sources: of the unit at every place.
        seconds: likewise.
    """
    until: list[float] = []
    before: list[int | None] = []
    for own_s, others in zip(seconds, sources):
        source = max(others, key=until.__getitem__) if others else None
        before.append(source)
        until.append(own_s if source is None else own_s + until[source])
    place: int | None = max(range(len(until)), key=until.__getitem__)
    way = []
    while place is not None:
        way.append(place)
        place = before[place]
    return way
