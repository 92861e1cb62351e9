"""What whole branches take, and where they are: found once for all limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_gpp.planner.graphpipe.layout import Interval, Run, joined
from lightning_gpp.planner.graphpipe.rates import Crew, Rates

Group = tuple[Run, ...]
"""Whole branches of one block in one stage."""


class Load(NamedTuple):
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


class Branches:
    """Seconds and places of whole branches.

    Branches that are alike and take as long share a *weight*, a number.
    """

    def __init__(self, rates: Rates, crews: Sequence[Crew]) -> None:
        self._crews = crews
        self._sums = [rates.least_seconds(crew) for crew in crews]
        self._weights: dict[Run, int] = {}
        self._seconds: list[list[float]] = []
        self._of_kind: dict[int, list[int]] = {}
        self._by_weight: dict[Group, dict[int, Group]] = {}
        self._loads: dict[Group, list[list[Load]]] = {}
        self._places: dict[Group, tuple[Interval, ...]] = {}
        self.first: list[Run] = []

    def weight(self, run: Run) -> int:
        """The weight of a branch."""
        found = self._weights.get(run)
        if found is None:
            found = self._weights[run] = self._weight(run)
        return found

    def _weight(self, run: Run) -> int:
        start, stop = run.interval
        seconds = [sums[stop] - sums[start] for sums in self._sums]
        numbers = self._of_kind.setdefault(run.kind, [])
        for number in numbers:  # running sums of equal seconds differ by rounding
            if all(math.isclose(*two, rel_tol=1e-9) for two in zip(seconds, self._seconds[number])):
                return number
        numbers.append(len(self._seconds))
        self._seconds.append(seconds)
        self.first.append(run)
        return numbers[-1]

    def by_weight(self, runs: Group) -> dict[int, Group]:
        """Some branches by their weights."""
        found = self._by_weight.get(runs)
        if found is None:
            alike: dict[int, list[Run]] = {}
            for run in runs:
                alike.setdefault(self.weight(run), []).append(run)
            found = {weight: tuple(some) for weight, some in alike.items()}
            self._by_weight[runs] = found
        return found

    def mix(self, group: Group) -> Mix:
        """The weights of some branches."""
        found: dict[int, int] = {}
        for run in group:
            weight = self.weight(run)
            found[weight] = found.get(weight, 0) + 1
        return tuple(found.items())

    def loads(self, runs: Group) -> list[list[Load]]:
        """For every crew the branches, the heaviest first."""
        found = self._loads.get(runs)
        if found is None:
            by_weight = self.by_weight(runs).items()
            found = self._loads[runs] = [
                sorted(
                    (Load(self._seconds[w][index], w, len(some)) for w, some in by_weight),
                    key=_heaviest_first,
                )
                for index in range(len(self._crews))
            ]
        return found

    def seconds(self, mix: Mix) -> list[float]:
        """Seconds per sample that a stage of branches takes at least, with every crew."""
        rows = [[count * each_s for each_s in self._seconds[weight]] for weight, count in mix]
        return rows[0] if len(rows) == 1 else list(map(sum, zip(*rows)))

    def places(self, group: Group) -> tuple[Interval, ...]:
        """Places of a stage of whole branches."""
        found = self._places.get(group)
        if found is None:
            found = self._places[group] = joined((), *(run.interval for run in group))
        return found


def _heaviest_first(load: Load) -> float:
    return -load.seconds
