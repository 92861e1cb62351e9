"""What a division of a space takes at least, about, before any has been found."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpp.planner.graphpipe.problem import Problem
from lightning_gpp.planner.graphpipe.space import Space


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


class LeastSteps:
    """The lower bounds of spaces, found once for all problems with the same units."""

    def __init__(self) -> None:
        self._found: dict[object, LeastStep] = {}

    def __call__(self, problem: Problem, space: Space) -> LeastStep:
        """The lower bounds of a space."""
        key = id(problem.prices), space.rates.microbatch_size, *space.crews
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = least_step(problem, space)
        return found


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
