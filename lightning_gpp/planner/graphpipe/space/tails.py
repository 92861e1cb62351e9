"""Ends of several branches in the stage that holds their join.

Seven branches of four layers fill eight devices only if the stage with the join takes the last
layer of four of them: then each of the other seven stages has three or four layers. For every
branch the shortest end that spares the rest of the branch a device is found, and the stage takes
those that cost it the least per device, while it is fast enough.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.layout import ElementRun, Interval


class Beginnings:
    """The beginnings of runs, as runs of their own: alike where the runs are alike."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], int] = {}
        self._runs: dict[tuple[ElementRun, int], ElementRun] = {}
        self._numbers = count(-1, -1)  # those of whole runs are not negative

    def beginning(self, run: ElementRun, size: int) -> ElementRun:
        """The first so many elements of a run."""
        found = self._runs.get((run, size))
        if found is None:
            kind = self._kinds.setdefault((run.kind, size), next(self._numbers))
            blocks = {element: runs for element, runs in run.blocks.items() if element < size}
            found = self._runs[run, size] = ElementRun(run.bounds[: size + 1], blocks, kind)
        return found


def sparing_size(num_devices: Sequence[float]) -> int | None:
    """Most elements of a run that need fewer devices than the whole run; None if there are none.

    Args:
        num_devices: fewest devices of the first so many elements, from none up to all of them;
            infinite where they find no stages.

    >>> sparing_size([0, 1, 1, 2, 2])
    2
    """
    whole = num_devices[-1]
    if math.isinf(whole):
        return None
    return next((s for s in range(len(num_devices) - 1, 0, -1) if num_devices[s] < whole), None)


def fewest_devices(
    run: ElementRun,
    limit_s: float,
    least_seconds: Mapping[Crew, Sequence[float]],
    fits: Callable[[Interval, Crew], bool],
) -> list[float]:
    """Fewest devices of the first so many elements of a run, from none up to all of them.

    One pass from the beginning, in which every stage has as few micro-batches in flight as the
    last one; so where memory is short, it may need more.

    Args:
        run: the run.
        limit_s: seconds per sample that a stage may take.
        least_seconds: possible devices of a stage -> running sums over the places of the seconds
            per sample that units take on them at least.
        fits: whether a stage of some places keeps to the limit on some devices, and finds memory.
    """
    fewest = [0.0]
    for stop in range(1, len(run) + 1):
        beside = run.blocks.get(stop - 1, ())
        found = math.inf
        if beside:
            branches = [fewest_devices(run, limit_s, least_seconds, fits) for run in beside]
            found = fewest[-1] + sum(branch[-1] for branch in branches)
        end = run.bounds[stop]
        for crew, sums in least_seconds.items():
            first = bisect_left(run.bounds, sums[end] - limit_s, hi=stop, key=sums.__getitem__)
            for start in range(first, stop):
                if fewest[start] + crew.num_replicas >= found:
                    break
                if fits((run.bounds[start], end), crew):
                    found = fewest[start] + crew.num_replicas
        fewest.append(found)
    return fewest


def end_of(run: ElementRun, size: int) -> Interval:
    """The places behind the first so many elements."""
    return run.bounds[size], run.bounds[-1]
