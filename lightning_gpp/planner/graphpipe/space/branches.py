"""What whole branches take, and where they are: found once for all limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.layout import ElementRun, Interval, joined
from lightning_gpp.planner.graphpipe.space.rates import Rates
from lightning_gpp.planner.graphpipe.tolerances import SECONDS

Group = tuple[ElementRun, ...]
"""Whole branches of one block in one stage."""


class AlikeBranches(NamedTuple):
    """Branches that are alike.

    Attributes:
        seconds: per sample that each of them takes at least.
        weight: their number (see :class:`Branches`).
        num_alike: how many there are.
    """

    seconds: float
    weight: int
    num_alike: int


Mix = tuple[tuple[int, int], ...]
"""Branches of a stage: the weight of some, and how many."""


def is_one(mix: Mix) -> bool:
    """Whether it is a single branch, which may also be cut."""
    return len(mix) == 1 and mix[0][1] == 1


class Branches:
    """Seconds and places of whole branches.

    Branches share a *weight*, a number, if they may stand for each other beside any other branches:
    they take as long, hold as much, and what they share with the rest of the model is the same.

    Attributes:
        work: of every weight, the device-seconds per sample that a branch takes at least.
    """

    def __init__(self, rates: Rates, crews: Sequence[Crew], work: Sequence[float]) -> None:
        self._contents = rates.contents
        self._num_crews = len(crews)
        self._sums = [rates.least_seconds(crew) for crew in crews]
        self._work_sums = work
        self.work: list[float] = []
        self._weights: dict[ElementRun, int] = {}
        self._rows: list[list[float]] = []
        self._alike: dict[object, list[int]] = {}
        self._by_weight: dict[Group, dict[int, Group]] = {}
        self._loads: dict[Group, list[list[AlikeBranches]]] = {}
        self._seconds: dict[Mix, list[float]] = {}
        self._places: dict[Mix, tuple[Interval, ...]] = {}

    def weight(self, run: ElementRun) -> int:
        """The weight of a branch."""
        found = self._weights.get(run)
        if found is None:
            found = self._weights[run] = self._weight(run)
        return found

    def _weight(self, run: ElementRun) -> int:
        start, stop = run.interval
        row = [sums[stop] - sums[start] for sums in self._sums]
        numbers = self._alike.setdefault((run.kind, *self._contents.of_branch(run.interval)), [])
        for number in numbers:  # running sums of equal seconds differ by rounding
            if all(math.isclose(*two, rel_tol=SECONDS) for two in zip(row, self._rows[number])):
                return number
        numbers.append(len(self._rows))
        self._rows.append(row)
        self.work.append(self._work_sums[stop] - self._work_sums[start])
        return numbers[-1]

    def by_weight(self, runs: Group) -> dict[int, Group]:
        """Some branches by their weights."""
        found = self._by_weight.get(runs)
        if found is None:
            alike: dict[int, list[ElementRun]] = {}
            for run in runs:
                alike.setdefault(self.weight(run), []).append(run)
            found = {weight: tuple(some) for weight, some in alike.items()}
            self._by_weight[runs] = found
        return found

    def loads(self, runs: Group) -> list[list[AlikeBranches]]:
        """For every crew the branches, the heaviest first."""
        found = self._loads.get(runs)
        if found is None:
            by_weight = self.by_weight(runs).items()
            found = self._loads[runs] = [
                sorted(
                    (AlikeBranches(self._rows[w][index], w, len(some)) for w, some in by_weight),
                    key=_heaviest_first,
                )
                for index in range(self._num_crews)
            ]
        return found

    def seconds(self, mix: Mix) -> list[float]:
        """Seconds per sample that a stage of branches takes at least, with every crew."""
        found = self._seconds.get(mix)
        if found is None:
            rows = [[number * each_s for each_s in self._rows[weight]] for weight, number in mix]
            found = self._seconds[mix] = list(map(sum, zip(*rows)))
        return found

    def places(self, mix: Mix, by_weight: Mapping[int, Group]) -> tuple[Interval, ...]:
        """Places of a stage of branches, which stands for all that hold as many of each weight.

        Args:
            mix: how many branches of each weight it holds.
            by_weight: branches to take them from.
        """
        found = self._places.get(mix)
        if found is None:
            runs = [run for weight, number in mix for run in by_weight[weight][:number]]
            found = self._places[mix] = joined((), *(run.interval for run in runs))
        return found


def _heaviest_first(load: AlikeBranches) -> float:
    return -load.seconds
