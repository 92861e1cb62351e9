"""Borders between stages in a row that have the devices given: the slowest one as fast as can be.

Messages do not count; a search on what comes out shifts borders to where little is sent.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from lightning_gpp.planner.graphpipe.tolerances import SECONDS

HALVINGS = 10
"""Of the interval that the seconds of the slowest stage are in."""


def balanced_borders(
    sums: Sequence[Sequence[float]], at_most_s: float = math.inf
) -> Iterator[list[int]]:
    """The borders with the last stage as short as can be, and those with the first one so.

    Args:
        sums: of each stage the running sums of what the places take on its devices.
        at_most_s: slower stages are of no interest.

    >>> even = [0, 1, 2, 3, 4, 5]
    >>> double = [2 * seconds for seconds in even]
    >>> list(balanced_borders([even, double]))
    [[0, 4, 5], [0, 3, 5]]
    >>> list(balanced_borders([even, double], at_most_s=3))
    []
    """
    # Equal seconds for all stages, if borders could be anywhere.
    low_s = 0.0 if 0 in (line[-1] for line in sums) else 1 / sum(1 / line[-1] for line in sums)
    high_s = min(at_most_s, max(line[-1] for line in sums))
    front = None if low_s > at_most_s else _from_front(sums, high_s)
    if front is None:
        return
    for _ in range(HALVINGS):
        middle_s = (low_s + high_s) / 2
        if (found := _from_front(sums, middle_s)) is None:
            low_s = middle_s
        else:
            front, high_s = found, _slowest_s(sums, found)
    yield front
    back = _from_back(sums, high_s)
    if back is not None and back != front:
        yield back


def _slowest_s(sums: Sequence[Sequence[float]], borders: Sequence[int]) -> float:
    pieces = zip(sums, borders, borders[1:])
    return max(line[stop] - line[start] for line, start, stop in pieces) * (1 + SECONDS)


def _from_front(sums: Sequence[Sequence[float]], limit_s: float) -> list[int] | None:
    """Stages as long as a limit allows, the first ones first; None if it is too low."""
    num_places = len(sums[0]) - 1
    borders = [0]
    for index, line in enumerate(sums):
        most = num_places - (len(sums) - 1 - index)
        stop = min(bisect_right(line, line[borders[-1]] + limit_s) - 1, most)
        if stop <= borders[-1]:
            return None
        borders.append(stop)
    return borders if borders[-1] == num_places else None


def _from_back(sums: Sequence[Sequence[float]], limit_s: float) -> list[int] | None:
    """The same, the last ones first."""
    borders = [len(sums[0]) - 1]
    for index in range(len(sums) - 1, -1, -1):
        line = sums[index]
        start = max(bisect_left(line, line[borders[-1]] - limit_s), index)
        if start >= borders[-1]:
            return None
        borders.append(start)
    return borders[::-1] if borders[-1] == 0 else None
