"""Ways to divide the end of a model into stages, of which only the best are kept.

A way is better with fewer devices and with less in flight at its beginning; one that is nowhere
better than another is dropped. What a stage holds in flight depends on the stages behind it by the
rule of :mod:`lightning_gpp.schedule.in_flight`: with micro-batches of ``k`` units before stages
``j`` of ``k_j`` units and ``i_j`` units in flight, ``i_j + k_j`` where ``k <= k_j`` and else
``i_j - k_j + 2 k``. That is ``max(need, offset + 2 k)`` with ``need = max_j(i_j + k_j)`` and
``offset = max_j(i_j - k_j)``, so two numbers say all about what follows.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.layout import Interval
from lightning_gpp.planner.graphpipe.space.usage import DeviceCounts

MAX_WAYS = 48
"""Most ways that are kept for one place; those with the most devices are dropped first."""


class Cut(NamedTuple):
    """A stage of a way.

    Attributes:
        intervals: places of its units.
        crew: its devices.
        units: its smallest micro-batches in flight.
        rest: the stages behind it, and beside.
    """

    intervals: tuple[Interval, ...]
    crew: Crew
    units: int
    rest: Trace | None


class Beside(NamedTuple):
    """Stages of a branch, or of several, beside others.

    Attributes:
        branch: its stages.
        rest: the stages of other branches, or behind the block.
    """

    branch: Trace | None
    rest: Trace | None


class Moved(NamedTuple):
    """Stages of a branch that is like another one.

    Attributes:
        branch: the stages of the other one.
        shift: by how many places they are to be moved.
        rest: nothing.
    """

    branch: Trace
    shift: int
    rest: Trace | None = None


Trace = Cut | Beside | Moved


class Way(NamedTuple):
    """One way to divide what follows some place.

    Attributes:
        need: units in flight that a stage before it needs at least.
        offset: units in flight of a stage before it, less twice its own micro-batch.
        used: devices (see :class:`DeviceCounts`).
        beside: for every join that is still to be forked, outermost first, the need and the offset
            of the branches beside the owner.
        trace: its stages.
    """

    need: int
    offset: int
    used: int
    beside: tuple[int, ...]
    trace: Trace | None


NO_OFFSET = -(1 << 40)
"""The offset of nothing."""

MODEL_END = Way(0, NO_OFFSET, 0, (), None)
"""Nothing follows."""


def units_in_flight(need: int, offset: int, multiple: int) -> int:
    """Units in flight of a stage before others: a whole number of its micro-batches.

    >>> units_in_flight(*MODEL_END[:2], multiple=4)
    4
    """
    return -(-max(need, offset + 2 * multiple, multiple) // multiple) * multiple


def add_way(ways: list[Way], new: Way, usage: DeviceCounts) -> None:
    """Adds a way to others, unless one of them is as good, and drops those that are worse."""
    if ways:
        guards = usage.guards
        need, offset, used, beside, _ = new
        is_worse = False
        for way in ways:
            if (
                way[0] <= need
                and way[1] <= offset
                and ((used | guards) - way[2]) & guards == guards
                and (not beside or all(map(int.__le__, way[3], beside)))
            ):
                return
            is_worse = is_worse or (need <= way[0] and offset <= way[1])
        if is_worse:
            ways[:] = [
                way
                for way in ways
                if need > way[0]
                or offset > way[1]
                or ((way[2] | guards) - used) & guards != guards
                or (beside and not all(map(int.__le__, beside, way[3])))
            ]
    ways.append(new)
    if len(ways) > MAX_WAYS:
        ways.remove(max(ways, key=lambda way: (usage.total(way.used), way.need)))


def collect_cuts(trace: Trace | None, shift: int = 0) -> list[tuple[Cut, int]]:
    """All stages of a way, each with the number of places by which it is to be moved."""
    found: list[tuple[Cut, int]] = []
    todo: list[tuple[Trace | None, int]] = [(trace, shift)]
    while todo:
        part, moved = todo.pop()
        while part is not None:
            if isinstance(part, Cut):
                found.append((part, moved))
            elif isinstance(part, Moved):
                todo.append((part.branch, moved + part.shift))
            else:
                todo.append((part.branch, moved))
            part = part.rest
    return found
