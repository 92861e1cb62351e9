"""Ways to divide the end of a model into stages, of which only the best are kept.

A way is better with fewer devices and with fewer micro-batches in flight at its beginning; one
that is nowhere better than another is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_gpp.planner.graphpipe.layout import Interval
from lightning_gpp.planner.graphpipe.rates import Crew
from lightning_gpp.planner.graphpipe.usage import Usage

MAX_WAYS = 48
"""Most ways that are kept for one place; those with the most devices are dropped first."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A stage of a way.

    Attributes:
        intervals: places of its units.
        crew: its devices.
        in_flight: its micro-batches in flight (its depth).
        rest: the stages behind it, and beside.
    """

    intervals: tuple[Interval, ...]
    crew: Crew
    in_flight: int
    rest: Trace | None


@dataclass(frozen=True, slots=True)
class Beside:
    """Stages of branches beside the owner of a block.

    Attributes:
        branches: (how many places on from where it was found, its stages) of each.
        rest: the stages behind the block.
    """

    branches: tuple[tuple[int, Trace], ...]
    rest: Trace | None


Trace = Cut | Beside


class Way(NamedTuple):
    """One way to divide what follows some place.

    Attributes:
        in_flight: micro-batches in flight of its first stage; 0 if there is none.
        used: devices (see :class:`Usage`).
        beside: for every join that is still to be forked, outermost first, the most micro-batches
            in flight of the first stages of the branches beside the owner.
        trace: its stages.
    """

    in_flight: int
    used: int
    beside: tuple[int, ...]
    trace: Trace | None


def add_way(ways: list[Way], new: Way, usage: Usage) -> None:
    """Adds a way to others, unless one of them is as good, and drops those that are worse."""
    guards = usage.guards
    in_flight, used, beside, _ = new
    kept = []
    for way in ways:
        if (
            way[0] <= in_flight
            and ((used | guards) - way[1]) & guards == guards
            and (not beside or all(map(int.__le__, way[2], beside)))
        ):
            return
        if not (
            in_flight <= way[0]
            and ((way[1] | guards) - used) & guards == guards
            and (not beside or all(map(int.__le__, beside, way[2])))
        ):
            kept.append(way)
    kept.append(new)
    if len(kept) > MAX_WAYS:
        kept.remove(max(kept, key=lambda way: (usage.total(way.used), way.in_flight)))
    ways[:] = kept


def collect_cuts(trace: Trace | None, shift: int = 0) -> list[tuple[Cut, int]]:
    """All stages of a way, each with the number of places by which it is to be moved."""
    found: list[tuple[Cut, int]] = []
    todo = [(trace, shift)]
    while todo:
        part, moved = todo.pop()
        while part is not None:
            if isinstance(part, Cut):
                found.append((part, moved))
            else:
                todo += [(branch, moved + more) for more, branch in part.branches]
            part = part.rest
    return found
