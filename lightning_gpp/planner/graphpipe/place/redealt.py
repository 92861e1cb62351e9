"""All units dealt anew, in the order of the stages, to groups of devices that differ a little.

Where stages own their devices, one of them gets more only when another has fewer, and then the
borders of all are out of balance: no change of one or two stages is better, but one of all may be.

.. code-block:: text

    a b c │ d e f │ g h          the third group goes to the second one, which is twice as large:
      0       1      2           a b │ c d e f g h
                                  0       1, 2
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.planner.graphpipe.place.draft import Draft, DraftStage
from lightning_gpp.planner.graphpipe.place.homes import Homes, given_out
from lightning_gpp.planner.graphpipe.place.unit_tables import UnitTables, places


class Team(NamedTuple):
    """The devices of a stage before they are given out.

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
    lines = Lines(order, draft.num_microbatches, tables)
    sizes = tables.request.replica_counts(len(kinds))
    seen: set[Teams] = set()
    for changed in _changed(teams):
        groups = given_out([(one.kind, one.size) for one in changed], kinds)
        if groups is None or changed in seen or not all(one.size in sizes for one in changed):
            continue
        seen.add(changed)
        borders = balanced([lines.of(team) for team in changed])
        if borders is None:
            continue
        units = [sum(1 << at for at in order[start:stop]) for start, stop in pairwise(borders)]
        stages = [
            DraftStage(own, devices, team.multiple, team.recompute)
            for own, devices, team in zip(units, groups, changed)
        ]
        yield _shared_evenly(draft._replace(stages=tuple(stages)))


class Lines:
    """What teams take for the first units of an order, all of a mini-batch.

    Args:
        order: of the units.
        num_microbatches: smallest micro-batches of the mini-batch.
        tables: of the units.
    """

    def __init__(self, order: Sequence[int], num_microbatches: int, tables: UnitTables) -> None:
        self._order, self._count, self._tables = order, num_microbatches, tables
        self._found: dict[Team, list[float]] = {}

    def of(self, team: Team) -> list[float]:
        """Running sums of seconds over the order."""
        found = self._found.get(team)
        if found is None:
            share = self._tables.request.minibatch_size * team.multiple / self._count / team.size
            each_s, times = self._tables.each_s(share, team.kind), self._count / team.multiple
            seconds = (times * each_s[at] for at in self._order)
            found = self._found[team] = [*accumulate(seconds, initial=0.0)]
        return found


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
