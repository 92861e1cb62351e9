"""The neighbours of a draft: single changes of everything that it contains.

What the busiest devices have comes first, as whoever looks may not look at all.

Every family is a function from a draft to drafts whose stages may be in any order, and may be such
that they cannot run; whoever looks at them finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, product

from lightning_gpp.planner.graphpipe.deals import branches, redealt
from lightning_gpp.planner.graphpipe.draft import (
    Draft,
    DraftStage,
    Units,
    UnitTables,
    places,
)
from lightning_gpp.planner.graphpipe.homes import Homes

Family = Callable[[Draft, Homes], Iterator[Draft]]
"""A kind of move; the homes are those of the draft."""


def regrouped(draft: Draft, homes: Homes) -> Iterator[Draft]:
    """A stage on other devices, or more or fewer of them."""
    for number in homes.busiest_first():
        stage = draft.stages[number]
        for devices in homes.others(stage):
            yield from _on(draft, number, [], stage, devices)


def dealt(draft: Draft, homes: Homes) -> Iterator[Draft]:
    """A stage cut in two, of which one may go to other devices."""
    for number in homes.busiest_first():
        stage = draft.stages[number]
        units, tables = stage.units, homes.tables
        for cut in dict.fromkeys(chain(by_work(units, tables), at_branches(units, tables))):
            first, second = (stage._replace(units=part) for part in cut)
            if homes.may_share:
                yield draft.with_stage(number, first, second)
            for stays, goes in ((first, second), (second, first)):
                for own, devices in homes.pairs(stage):
                    yield from _on(draft, number, [_there(stays, own)], goes, devices)


def parted(draft: Draft, homes: Homes) -> Iterator[Draft]:
    """A stage cut into what waits for the same other stages; and all stages at once."""
    if not homes.may_share:
        return
    everywhere: list[DraftStage] = []
    for number, stage in enumerate(draft.stages):
        pieces = by_needs(draft.stages, number, homes.tables)
        own = [stage._replace(units=units) for units in pieces]
        everywhere += own
        if len(own) > 1:
            yield draft.with_stage(number, *own)
    if len(everywhere) > len(draft.stages) + 1:
        yield draft._replace(stages=tuple(everywhere))


def shifted(draft: Draft, homes: Homes) -> Iterator[Draft]:
    """The first or last units of a stage in another one that they exchange values with."""
    sources = homes.tables.sources
    for number in homes.busiest_first():
        stage = draft.stages[number]
        for other, taker in enumerate(draft.stages):
            if sources(taker.units) & stage.units:
                yield from _handed(draft, number, other, _ends(stage.units, last=True))
            elif sources(stage.units) & taker.units:
                yield from _handed(draft, number, other, _ends(stage.units, last=False))


def branched(draft: Draft, homes: Homes) -> Iterator[Draft]:
    """A whole branch of a stage in another one."""
    masks = [sum(1 << at for at in branch) for branch in branches(homes.tables)]
    order = homes.busiest_first()
    for number in order:
        parts = [own for mask in masks if (own := mask & draft.stages[number].units)]
        for other in reversed(order):
            if other != number and len(parts) > 1:
                yield from _handed(draft, number, other, iter(parts))


def exchanged(draft: Draft, homes: Homes) -> Iterator[Draft]:
    """A branch of a stage for one of another: neither may have room or time for both."""
    masks = [sum(1 << at for at in branch) for branch in branches(homes.tables)]
    parts = [[own for mask in masks if (own := mask & one.units)] for one in draft.stages]
    order = homes.busiest_first()
    for at, first in enumerate(order):
        for second in reversed(order[at + 1 :]):
            stage, other = draft.stages[first], draft.stages[second]
            for given, taken in product(parts[first], parts[second]):
                if given | taken != stage.units | other.units:
                    here = stage._replace(units=stage.units ^ given ^ taken)
                    there = other._replace(units=other.units ^ given ^ taken)
                    yield draft.with_stage(first, here).with_stage(second, there)


def merged(draft: Draft, homes: Homes) -> Iterator[Draft]:
    """Two stages as one, on the devices of either, or of both: those with an edge, or near."""
    for first, stage in enumerate(draft.stages):
        for second in range(first + 1, len(draft.stages)):
            other = draft.stages[second]
            is_near = homes.tables.sources(other.units) & stage.units
            if is_near or not set(stage.devices).isdisjoint(other.devices):
                yield from joined(draft, first, second)
                rest, units = draft.with_stage(second), stage.units | other.units
                for devices in homes.together(stage, other):
                    both = stage._replace(units=units, devices=devices, shares=())
                    yield from _on(rest, first, [], both, devices)
                    if homes.tables.request.num_microbatches is None:
                        taken = stage.multiple + other.multiple
                        yield from _on(rest, first, [], both._replace(multiple=taken), devices)


def joined(draft: Draft, first: int, second: int) -> Iterator[Draft]:
    """Two stages as one, as either of them is."""
    stage, other = draft.stages[first], draft.stages[second]
    rest, units = draft.with_stage(second), stage.units | other.units
    for kept in dict.fromkeys(one._replace(units=units) for one in (stage, other)):
        yield rest.with_stage(first, kept)


def swapped(draft: Draft, homes: Homes) -> Iterator[Draft]:
    """Two stages on each other's devices; with the last one also so that the loss stays there."""
    last = len(draft.stages) - 1
    for first, stage in enumerate(draft.stages):
        for second in range(first + 1, len(draft.stages)):
            other = draft.stages[second]
            if stage.devices != other.devices:
                there, here = other._replace(units=stage.units), stage._replace(units=other.units)
                yield draft.with_stage(first, there).with_stage(second, here)
                if second == last:
                    yield draft.with_stage(first, here).with_stage(second, there)


def resized(draft: Draft, homes: Homes) -> Iterator[Draft]:
    """Micro-batches of twice or half the size: of all stages, of those on some devices, of one."""
    if homes.tables.request.num_microbatches is not None:
        return
    groups = [set(range(len(draft.stages)))]
    together: dict[tuple[int, ...], set[int]] = {}
    for number, stage in enumerate(draft.stages):
        together.setdefault(stage.devices, set()).add(number)
    groups += together.values()
    groups += ({number} for number in range(len(draft.stages)))
    fine = draft.scaled(2)
    for group in dict.fromkeys(map(frozenset, groups)):
        larger, smaller = list(draft.stages), list(fine.stages)
        for number in group:
            larger[number] = fine.stages[number]
            if not draft.stages[number].shares:
                smaller[number] = draft.stages[number]
        yield draft._replace(stages=tuple(larger)).reduced()
        yield fine._replace(stages=tuple(smaller)).reduced()


def reordered(draft: Draft, homes: Homes) -> Iterator[Draft]:
    """Two stages that follow one another in the numbering the other way round.

    Where a device has several steps to choose from, the numbers of their stages decide last.
    """
    for first in range(len(draft.stages) - 1):
        stage, other = draft.stages[first : first + 2]
        if not homes.tables.sources(other.units) & stage.units:
            yield draft.with_stage(first + 1).with_stage(first, other, stage)


FAMILIES: tuple[Family, ...] = (
    redealt,
    dealt,
    parted,
    resized,
    regrouped,
    shifted,
    merged,
    swapped,
    branched,
    reordered,
)
"""All moves, those that change most first: the finer ones keep a plan near where it began."""


def _on(
    draft: Draft, number: int, stays: list[DraftStage], stage: DraftStage, devices: tuple[int, ...]
) -> Iterator[Draft]:
    """A draft with a stage on other devices, which share its micro-batches."""
    factor = 1
    while stage.multiple * factor % len(devices):
        factor *= 2
        if factor > len(devices):
            return
    moved = draft.with_stage(number, *stays, _there(stage, devices))
    if factor > 1:
        moved = moved.scaled(factor)
    # fewer replicas may take larger smallest micro-batches
    yield moved.reduced() if len(devices) < stage.num_replicas else moved


def _there(stage: DraftStage, devices: tuple[int, ...]) -> DraftStage:
    """A stage on some devices; on others than before they share its micro-batches equally."""
    if stage.devices == devices:
        return stage
    return stage._replace(devices=devices, shares=())


def _handed(draft: Draft, source: int, target: int, runs: Iterator[Units]) -> Iterator[Draft]:
    """Drafts with units of one stage in another."""
    giver, taker = draft.stages[source], draft.stages[target]
    for units in runs:
        left = giver._replace(units=giver.units & ~units)
        taken = taker._replace(units=taker.units | units)
        if left.units:
            yield draft.with_stage(target, taken).with_stage(source, left)
        else:
            yield draft.with_stage(target, taken).with_stage(source)


def _ends(units: Units, *, last: bool) -> Iterator[Units]:
    """The first or the last 1, 2, 4, … units."""
    members = list(places(units))
    count = 1
    while count < len(members):
        yield sum(1 << at for at in (members[-count:] if last else members[:count]))
        count *= 2


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
