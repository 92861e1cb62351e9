"""Units dealt to groups of devices: anew for groups that differ a little, or without any search.

Where stages own their devices, one of them gets more only when another has fewer, and then the
borders of all are out of balance: no change of one or two stages is better, but one of all may be.

.. code-block:: text

    a b c │ d e f │ g h          the third group goes to the second one, which is twice as large:
      0       1      2           a b │ c d e f g h
                                  0       1, 2

Without any search, units are dealt to equal groups in depth-first order. A plan is then a map from
units to groups of devices; its stages follow from it: units of one group that wait for the same
stages of other groups are one stage. So no unit waits for what it does not need, and a join beside
a branch is a stage of its own on the same devices.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.graphpipe.draft import Draft, DraftStage, Units, UnitTables, places
from lightning_gpp.planner.graphpipe.homes import Homes, given_out


class Team(NamedTuple):
    """A group of devices, before it is decided which ones.

    Attributes:
        size: how many.
        kind: of all of them.
        multiple: smallest micro-batches that they take at a time.
        recompute: whether the stage runs its forward again.
        may_take_more: whether with more devices it takes more at a time, as many as before each.
    """

    size: int
    kind: str
    multiple: int
    recompute: bool
    may_take_more: bool

    @property
    def doubled(self) -> Team:
        """Twice the devices."""
        factor = 2 if self.may_take_more else 1
        return self._replace(size=2 * self.size, multiple=factor * self.multiple)

    @property
    def halved(self) -> Team:
        """Half the devices, of two or more."""
        divisor = 2 if self.may_take_more and self.multiple % 2 == 0 else 1
        return self._replace(size=self.size // 2, multiple=self.multiple // divisor)


Teams = tuple[Team, ...]


def redealt(draft: Draft, homes: Homes) -> Iterator[Draft]:
    """The drafts with other groups, the borders between them balanced; none where stages share."""
    tables = homes.tables
    kinds = [device.kind for device in tables.request.cluster.devices]
    is_mixed = any(len({kinds[d] for d in stage.devices}) > 1 for stage in draft.stages)
    if homes.may_share or is_mixed:
        return
    may_take_more = tables.request.num_microbatches is None
    teams = tuple(
        Team(one.num_replicas, kinds[one.devices[0]], one.multiple, one.recompute, may_take_more)
        for one in draft.stages
    )
    order = [at for stage in draft.stages for at in places(stage.units)]
    count, known = draft.num_microbatches, dict[Team, list[float]]()

    def line(team: Team) -> list[float]:
        """Running sums of a team's seconds over the order, all of a mini-batch."""
        if team not in known:
            share = tables.request.minibatch_size * team.multiple / count / team.size
            each_s, times = tables.each_s(share, team.kind), count / team.multiple
            known[team] = [*accumulate((times * each_s[at] for at in order), initial=0.0)]
        return known[team]

    sizes = tables.request.replica_counts(len(kinds))
    seen: set[Teams] = set()
    for changed in _changed(teams):
        groups = given_out([(one.kind, one.size) for one in changed], tables.devices_of)
        if groups is None or changed in seen or not all(one.size in sizes for one in changed):
            continue
        seen.add(changed)
        borders = balanced([line(team) for team in changed])
        if borders is None:
            continue
        units = [sum(1 << at for at in order[start:stop]) for start, stop in pairwise(borders)]
        stages = [
            DraftStage(own, devices, team.multiple, team.recompute)
            for own, devices, team in zip(units, groups, changed)
        ]
        yield _shared_evenly(draft._replace(stages=tuple(stages)))


def _changed(teams: Teams) -> Iterator[Teams]:
    """The same; then with one change; then with devices of one team for another, near ones first.

    They may ask for more devices than there are.
    """
    yield teams
    for at in range(len(teams)):
        yield from _kept(teams, at)
        yield from _more(teams, at)
    fewer = [(at, *one) for at in range(len(teams)) for one in _fewer(teams, at)]
    yield from (one for _, one, _ in fewer)
    for distance in range(len(teams)):
        for at, one, freed in fewer:
            for other in {at - distance, at + distance}.intersection(range(len(one))):
                yield from _more(one, other)
                yield (*one[: other + 1], freed, *one[other + 1 :])


def _kept(teams: Teams, at: int) -> Iterator[Teams]:
    """A team becomes two, it and the next one become one, or they swap, with as many devices."""
    before, team, behind = teams[:at], teams[at], teams[at + 1 :]
    if team.size > 1:
        yield (*before, team.halved, team.halved, *behind)
    if behind and behind[0][:2] == team[:2]:
        yield (*before, team.doubled, *behind[1:])
    if behind and behind[0] != team:
        yield (*before, behind[0], team, *behind[1:])


def _more(teams: Teams, at: int) -> Iterator[Teams]:
    """A team gets twice the devices, or another one beside it."""
    before, team, behind = teams[:at], teams[at], teams[at + 1 :]
    yield (*before, team.doubled, *behind)
    yield (*before, team, team, *behind)


def _fewer(teams: Teams, at: int) -> Iterator[tuple[Teams, Team]]:
    """A team gets half the devices, or is gone; and a team of those that are free then."""
    before, team, behind = teams[:at], teams[at], teams[at + 1 :]
    if team.size > 1:
        yield (*before, team.halved, *behind), team.halved
    if before or behind:
        yield (*before, *behind), team


def balanced(lines: Sequence[Sequence[float]]) -> list[int] | None:
    """Borders with which the slowest team is as fast as can be; None if some have nothing to do.

    A limit that is too low becomes the least one with which some team could take a unit more.

    Args:
        lines: of every team the running sums of seconds over the units.

    >>> even = [0, 1, 2, 3, 4, 5]
    >>> balanced([even, [2 * seconds for seconds in even]])
    [0, 4, 5]
    """
    last = len(lines[0]) - 1
    rates = [1 / line[-1] for line in lines if line[-1]]
    limit_s = 1 / sum(rates) if len(rates) == len(lines) else 0.0
    while last >= len(lines):
        borders, slowest_s, next_s = [0], 0.0, math.inf
        for number, line in enumerate(lines, 1):
            start, most = borders[-1], last - (len(lines) - number)
            stop = bisect_right(line, line[start] + limit_s) - 1
            borders.append(min(most, max(stop, start + 1)))
            took_s = line[borders[-1]] - line[start]
            slowest_s = max(slowest_s, took_s)
            more_s = line[min(most, borders[-1] + 1)] - line[start]
            next_s = min([next_s, *(one for one in (took_s, more_s) if one > limit_s)])
        if borders[-1] == last and slowest_s <= limit_s:
            return borders
        limit_s = next_s * (1 + ROUNDING)
    return None


def _shared_evenly(draft: Draft) -> Draft:
    """The draft in smallest micro-batches that all replicas share in equal parts."""
    parts = [one.num_replicas // math.gcd(one.multiple, one.num_replicas) for one in draft.stages]
    return draft.scaled(math.lcm(*parts)).reduced()


ROUNDS = (2, 4, 8)
"""So many runs of a group are tried."""


def deals(tables: UnitTables, *, may_share: bool = True) -> Iterator[Draft]:
    """Equal work for groups of 1, 2, 4, … devices, with every size of micro-batches.

    On all devices, and on a half, a quarter, … of them: on many devices there may be too little
    work for all.

    Args:
        tables: of the units.
        may_share: whether a group has the stages that follow from its units; otherwise it has one.
    """
    request = tables.request
    for replicas, num_groups in groupings(tables):
        maps = [
            equal_groups(tables, num_groups),
            packed_branches(tables, num_groups),
            equal_groups(tables, num_groups, tables.model_order),
        ]
        for groups in dict.fromkeys(map(tuple, maps)):
            pieces = followed(groups, tables) if may_share else runs(groups)
            yield from _of_every_size(pieces, replicas, request)


def deals_in_turn(tables: UnitTables) -> Iterator[Draft]:
    """Runs of equal work dealt to the groups in turn, several rounds: an interleaved pipeline.

    A micro-batch comes to the last group after one run of every other group, not after all of their
    work, so that less time is lost until all have something to do (Narayanan et al., arXiv
    2104.04473, section 2.2). It is paid for with as many more messages.

    .. code-block:: text

        a b c d │ e f g h        two rounds:  a b │ e f        on group 0
            0        1                        c d │ g h        on group 1
    """
    pace = 0.0 if tables.request.order.forwards_first else None  # the longest path first
    for replicas, num_groups in groupings(tables):
        is_on_all = replicas * num_groups == tables.request.num_devices
        for rounds in ROUNDS if is_on_all and num_groups > 1 else ():
            if rounds * num_groups <= tables.num_units:
                each = equal_groups(tables, rounds * num_groups)
                pieces = followed([run % num_groups for run in each], tables)
                for draft in _of_every_size(pieces, replicas, tables.request):
                    yield draft._replace(order_pace=pace)


def _of_every_size(
    pieces: Sequence[tuple[int, Units]], replicas: int, request: PlanRequest
) -> Iterator[Draft]:
    """Stages of groups of so many devices, with every size of micro-batches."""
    stages = [
        DraftStage(units, tuple(range(at * replicas, (at + 1) * replicas)), replicas)
        for at, units in pieces
    ]
    for size in request.microbatch_sizes:
        yield Draft(tuple(stages), round(request.minibatch_size / size) * replicas)


def groupings(tables: UnitTables) -> Iterator[tuple[int, int]]:
    """Replicas, and how many groups of so many devices: not many more than there are units."""
    request = tables.request
    for replicas in request.replica_counts(request.num_devices):
        num_groups = request.num_devices // replicas
        while num_groups:
            if num_groups < 2 * tables.num_units:
                yield replicas, num_groups
            num_groups //= 2


def equal_groups(
    tables: UnitTables, num_groups: int, order: Sequence[int] | None = None
) -> list[int]:
    """The group of every unit: the order cut into runs of equal work.

    Args:
        tables: of the units.
        num_groups: how many groups there are.
        order: of the units; depth first if not given.
    """
    total_s = sum(tables.compute_s)
    groups, done_s = [0] * tables.num_units, 0.0
    for at in order or range(tables.num_units):
        unit_s = tables.compute_s[at]
        middle = (done_s + unit_s / 2) / total_s if total_s else 0.0
        groups[at] = min(num_groups - 1, int(middle * num_groups))
        done_s += unit_s
    return groups


def packed_branches(tables: UnitTables, num_groups: int) -> list[int]:
    """The same with whole branches, long ones cut: the longest first to the least busy group."""
    compute_s = tables.compute_s
    atoms: list[list[int]] = []
    for branch in branches(tables):
        own_s = sum(compute_s[at] for at in branch)
        num_parts = max(1, round(own_s * num_groups / sum(compute_s))) if own_s else 1
        atoms += _cut(branch, compute_s, min(num_parts, len(branch)))
    busy_s, home = [0.0] * num_groups, [0] * tables.num_units
    for atom in sorted(atoms, key=lambda one: -sum(compute_s[at] for at in one)):
        group = busy_s.index(min(busy_s))
        busy_s[group] += sum(compute_s[at] for at in atom)
        for at in atom:
            home[at] = group
    return home


def branches(tables: UnitTables) -> list[list[int]]:
    """The depth-first order cut where a unit does not read from the one before it alone."""
    found: list[list[int]] = []
    for at, needs in enumerate(tables.needs):
        if not at or needs != 1 << (at - 1):
            found.append([])
        found[-1].append(at)
    return found


def _cut(branch: list[int], seconds: Sequence[float], num_parts: int) -> Iterator[list[int]]:
    """A branch in parts of equal work."""
    borders = balanced([[*accumulate((seconds[at] for at in branch), initial=0.0)]] * num_parts)
    assert borders is not None  # there are as many units
    for start, stop in pairwise(borders):
        yield branch[start:stop]


def runs(groups: Sequence[int]) -> list[tuple[int, Units]]:
    """Every group with all of its units, which follow one another."""
    found: dict[int, Units] = {}
    for at, group in enumerate(groups):
        found[group] = found.get(group, 0) | 1 << at
    return list(found.items())


def followed(groups: Sequence[int], tables: UnitTables) -> list[tuple[int, Units]]:
    """The stages of a map: (group, units) of each, none before those that it reads from.

    Args:
        groups: of every unit.
        tables: of the units.
    """
    waits: list[int] = []  # stages of other groups that a unit waits for, one bit each
    stage_of: list[int] = []
    stages: dict[tuple[int, int], int] = {}
    found: list[tuple[int, Units]] = []
    for at, group in enumerate(groups):
        above = 0
        for source in places(tables.needs[at]):
            above |= waits[source]
            if groups[source] != group:
                above |= 1 << stage_of[source]
        stage = stages.setdefault((group, above), len(stages))
        if stage == len(found):
            found.append((group, 0))
        found[stage] = group, found[stage][1] | 1 << at
        waits.append(above)
        stage_of.append(stage)
    return found
