"""Branches packed into stages by time: first-fit decreasing.

From the heaviest branch to the lightest, each one goes into the first stage that has room for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lightning_gpp.planner.graphpipe.layout import Interval, Run, joined
from lightning_gpp.planner.graphpipe.rates import Crew, Rates

Group = tuple[Run, ...]
"""Whole branches of one block in one stage."""


def first_fit(
    weights: Sequence[tuple[float, Run]],
    limit_s: float,
    may_be: Callable[[Group], bool] | None = None,
) -> tuple[tuple[Group, ...], float]:
    """Packs branches into stages, each into the first one that has room for it.

    Args:
        weights: branches with their seconds per sample, the heaviest first.
        limit_s: seconds per sample that a stage may take; a branch that takes more is alone.
        may_be: what else decides about several branches in a stage, as memory does.

    Returns:
        The branches of each stage, and the limit below which they are no others.

    >>> a, b, c = (Run((place, place + 1), {}, kind=0) for place in range(3))
    >>> groups, next_limit_s = first_fit([(3.0, a), (2.0, b), (1.0, c)], 4.0)
    >>> [len(group) for group in groups], next_limit_s
    ([2, 1], 5.0)
    """
    groups: list[Group] = []
    rooms_s: list[float] = []
    least_lack_s = math.inf
    for run_s, run in weights:
        for index, room_s in enumerate(rooms_s):
            if run_s > room_s:
                least_lack_s = min(least_lack_s, run_s - room_s)
            elif may_be is None or may_be((*groups[index], run)):
                groups[index] = (*groups[index], run)
                rooms_s[index] -= run_s
                break
        else:
            groups.append((run,))
            rooms_s.append(limit_s - run_s)
    return tuple(groups), limit_s + least_lack_s


class Branches:
    """What branches take and where they are, found once for all limits."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._seconds: dict[tuple[Run, Crew], float] = {}
        self._by_weight: dict[tuple[Group, Crew], list[tuple[float, Run]]] = {}
        self._places: dict[Group, tuple[Interval, ...]] = {}

    def seconds(self, run: Run, crew: Crew) -> float:
        """Seconds per sample that a branch takes at least."""
        found = self._seconds.get((run, crew))
        if found is None:
            sums = self._rates.least_seconds(crew)
            found = self._seconds[run, crew] = sums[run.bounds[-1]] - sums[run.start]
        return found

    def by_weight(self, runs: Group, crew: Crew) -> list[tuple[float, Run]]:
        """Branches with the seconds per sample that they take at least, the heaviest first."""
        found = self._by_weight.get((runs, crew))
        if found is None:
            pairs = [(self.seconds(run, crew), run) for run in runs]
            found = self._by_weight[runs, crew] = sorted(pairs, key=lambda pair: -pair[0])
        return found

    def places(self, group: Group) -> tuple[Interval, ...]:
        """Places of a stage of whole branches."""
        found = self._places.get(group)
        if found is None:
            found = self._places[group] = joined((), *(run.interval for run in group))
        return found
