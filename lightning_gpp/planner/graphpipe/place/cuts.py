"""Where a stage may be cut in two or more."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpp.planner.graphpipe.place.draft import DraftStage, Units
from lightning_gpp.planner.graphpipe.place.unit_tables import UnitTables, places

FRACTIONS = (0.125, 0.25, 0.5, 0.75, 0.875)
"""Parts of its work at which a stage is cut; finer ones are found by moving the border."""


def by_work(units: Units, tables: UnitTables) -> Iterator[tuple[Units, Units]]:
    """Cuts of the depth-first order near some fractions of the work, and beside single units."""
    members = list(places(units))
    total_s = tables.seconds(units)
    stops = {1, len(members) - 1}
    done_s, wanted = 0.0, list(FRACTIONS)
    for number, at in enumerate(members[:-1], 1):
        done_s += tables.compute_s[at]
        while wanted and done_s >= wanted[0] * total_s:
            stops.add(number)
            wanted.pop(0)
    first, number = 0, 0
    for stop in sorted(stops - {0, len(members)}):
        for at in members[number:stop]:
            first |= 1 << at
        number = stop
        yield first, units & ~first


def at_branches(units: Units, tables: UnitTables) -> Iterator[tuple[Units, Units]]:
    """Cuts where the depth-first order begins another branch: a unit does not read the last one."""
    first, before = 0, 0
    for at in places(units):
        if first and not tables.needs[at] & before:
            yield first, units & ~first
        before = 1 << at
        first |= before


def by_needs(stages: tuple[DraftStage, ...], number: int, tables: UnitTables) -> list[Units]:
    """The pieces of a stage that wait for the same other stages, directly or not.

    So no unit waits for what it does not need: a join beside a branch is a piece of its own.

    .. code-block:: text

        device 0   a ── b ─┐          stage {a, b, join} waits for c at its begin,
        device 1   c ──────┴─ join    pieces {a, b} and {join}
    """
    waits: dict[int, set[int]] = {}
    pieces: dict[frozenset[int], Units] = {}
    above: list[frozenset[int]] = []  # of the stages before: all that they wait for, and themselves
    for index, stage in enumerate(stages[:number]):
        found = {index}
        for other in range(index):
            if tables.sources(stage.units) & stages[other].units:
                found |= above[other]
        above.append(frozenset(found))
    units = stages[number].units
    for at in places(units):
        found = set()
        for other in places(tables.needs[at] & units):
            found |= waits[other]
        for index in range(number):
            if tables.needs[at] & stages[index].units:
                found |= above[index]
        waits[at] = found
        key = frozenset(found)
        pieces[key] = pieces.get(key, 0) | 1 << at
    return list(pieces.values())
