"""Ends of several branches in the stage that holds their join.

Seven branches of four layers fill eight devices only if the stage with the join takes the last
layer of four of them: then each of the other seven stages has three or four layers. For every
branch the shortest end that spares the rest of the branch a device is found by bisection, and the
stage takes those that cost it the least per device, while it is fast enough.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from lightning_gpp.planner.graphpipe.layout import Interval, Run


class Beginnings:
    """The beginnings of runs, as runs of their own: alike where the runs are alike."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], int] = {}
        self._runs: dict[tuple[Run, int], Run] = {}
        self._numbers = count(-1, -1)  # those of whole runs are not negative

    def beginning(self, run: Run, size: int) -> Run:
        """The first so many elements of a run."""
        found = self._runs.get((run, size))
        if found is None:
            kind = self._kinds.setdefault((run.kind, size), next(self._numbers))
            blocks = {element: runs for element, runs in run.blocks.items() if element < size}
            found = self._runs[run, size] = Run(run.bounds[: size + 1], blocks, kind)
        return found


def sparing_size(run: Run, num_devices: Callable[[int], int | None]) -> int | None:
    """Most elements of a run that need fewer devices than the whole run; None if there are none.

    Args:
        run: the run.
        num_devices: fewest devices of the first so many elements; None where there is no way.
    """
    whole = num_devices(len(run))
    if whole is None or whole < 2:
        return None
    low, high = 0, len(run)  # what low elements need is fewer, what high ones need is not
    while high - low > 1:
        middle = (low + high) // 2
        needed = num_devices(middle)
        if needed is not None and needed < whole:
            low = middle
        else:
            high = middle
    return low or None


def end_of(run: Run, size: int) -> Interval:
    """The places behind the first so many elements."""
    return run.bounds[size], run.bounds[-1]
