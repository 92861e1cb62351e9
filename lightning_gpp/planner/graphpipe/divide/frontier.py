"""Ways to divide the end of a model into stages, of which only the best are kept.

A way is better with fewer devices and with less in flight at its beginning; one that is nowhere
better than another is dropped. What a stage holds in flight depends on the stages behind it by the
rule of :mod:`lightning_gpp.schedule.in_flight`: with micro-batches of ``k`` units before a stage of
``k_j`` units and ``i_j`` units in flight, ``i_j + k_j`` where ``k <= k_j`` and else
``i_j - k_j + 2 k``. That is ``max(need, offset + 2 k)`` with ``need = i_j + k_j`` and
``offset = i_j - k_j``, so two numbers say all about what follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lightning_gpp.planner.graphpipe.space.crew import Crew, Interval
from lightning_gpp.planner.graphpipe.space.usage import DeviceCounts


class Cut(NamedTuple):
    """A stage of a way.

    Attributes:
        interval: places of its units.
        crew: its devices.
        units: its smallest micro-batches in flight.
        rest: the stages behind it.
    """

    interval: Interval
    crew: Crew
    units: int
    rest: Cut | None


class Way(NamedTuple):
    """One way to divide what follows some place.

    Attributes:
        need: units in flight that a stage before it needs at least.
        offset: units in flight of a stage before it, less twice its own micro-batch.
        used: devices (see :class:`DeviceCounts`).
        first: its first stage.
    """

    need: int
    offset: int
    used: int
    first: Cut | None

    def cuts(self) -> Iterator[Cut]:
        """Its stages in the order of their places."""
        cut = self.first
        while cut is not None:
            yield cut
            cut = cut.rest


MODEL_END = Way(0, -(1 << 40), 0, None)
"""Nothing follows."""


def units_in_flight(behind: Way, multiple: int) -> int:
    """Units in flight of a stage before others: a whole number of its micro-batches.

    >>> units_in_flight(MODEL_END, multiple=4)
    4
    """
    return -(-max(behind.need, behind.offset + 2 * multiple, multiple) // multiple) * multiple


def add_way(ways: list[Way], new: Way, usage: DeviceCounts) -> None:
    """Adds a way to others, unless one of them is as good, and drops those that are worse."""
    if any(_is_as_good(way, new, usage) for way in ways):
        return
    ways[:] = [way for way in ways if not _is_as_good(new, way, usage)]
    ways.append(new)


def _is_as_good(one: Way, other: Way, usage: DeviceCounts) -> bool:
    return (
        one.need <= other.need
        and one.offset <= other.offset
        and usage.is_no_more(one.used, other.used)
    )
