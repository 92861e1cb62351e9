"""What no division of a space can beat: lower bounds of the estimate of its step."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpp.planner.graphpipe.problem import Problem
from lightning_gpp.planner.graphpipe.space import Space


@dataclass(frozen=True, slots=True)
class LeastStep:
    """Lower bounds of the estimate of a step (see ``estimate_step_s``) in one space.

    A step is a fill, the first micro-batch on its way through all units that depend on each other,
    and then a cycle of the slowest stage for every other micro-batch.

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
    size = space.rates.microbatch_size
    samples = problem.request.minibatch_size - size * max(crew.multiple for crew in space.crews)
    seconds = [space.rates.seconds(crew) for crew in space.crews]
    work = [
        (crew.num_replicas / space.usage.num_devices, space.rates.least_seconds(crew))
        for crew in space.crews
    ]
    places = range(len(space.layout.order))
    fastest = [min(s[place + 1] - s[place] for s in seconds) for place in places]
    way = _longest_way(problem, fastest)
    step_s = sum(
        min(
            (way_s[p + 1] - way_s[p] if p in way else 0.0)
            + samples * share * (work_s[p + 1] - work_s[p])
            for way_s, (share, work_s) in zip(seconds, work)
        )
        for p in places
    )
    fill_s = sum(fastest[place] for place in way)
    return LeastStep(fill_s, samples, max(step_s, fill_s + samples * space.lower_bound_s))


def _longest_way(problem: Problem, seconds: list[float]) -> set[int]:
    """The places on the longest way through units that depend on each other."""
    layout = problem.layout
    until: list[float] = []
    before: list[int | None] = []
    for place, unit in enumerate(layout.order):
        sources = [layout.place[source] for source in problem.units.predecessors[unit]]
        source = max(sources, key=until.__getitem__, default=None)
        before.append(source)
        until.append(seconds[place] + (0.0 if source is None else until[source]))
    last: int | None = max(range(len(until)), key=until.__getitem__)
    way = set()
    while last is not None:
        way.add(last)
        last = before[last]
    return way
