"""Branches packed into stages by time: first-fit decreasing.

From the heaviest branches to the lightest, each one goes into the first stage that has room for it.
Branches that are alike go together, and stages that hold as many of each are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lightning_gpp.planner.graphpipe.branches import Group, Load, Mix
from lightning_gpp.planner.graphpipe.rates import Crew
from lightning_gpp.planner.graphpipe.space import Space

Stack = tuple[Mix, int]
"""Stages that hold as many branches of each weight: these branches, and how many stages."""


def first_fit(
    loads: Sequence[Load], limit_s: float, may_be: Callable[[Mix], bool] | None = None
) -> tuple[list[Stack], float]:
    """Packs branches into stages, each into the first one that has room for it.

    Args:
        loads: the branches, the heaviest first.
        limit_s: seconds per sample that a stage may take; a branch that takes more is alone.
        may_be: what else decides about several branches in a stage, as memory does. Where it
            forbids some it forbids them with more, too.

    Returns:
        The stages, and a larger limit up to which they stay the same.

    >>> first_fit([Load(2.0, weight=7, num_alike=5), Load(1.0, weight=8, num_alike=1)], limit_s=5.0)
    ([(((7, 2), (8, 1)), 1), (((7, 2),), 1), (((7, 1),), 1)], 6.0)
    """
    stages: list[tuple[Mix, int, float]] = []  # the branches of each, how many, and their room
    least_lack_s = math.inf
    for each_s, weight, left in loads:
        found: list[tuple[Mix, int, float]] = []
        for mix, count, room_s in (*stages, ((), left, limit_s)):  # the last ones are still empty
            fit = 0
            if left:
                if each_s <= room_s:
                    fit = left if left * each_s <= room_s else int(room_s / each_s)
                elif not mix:
                    fit = 1
                if fit < left:
                    least_lack_s = min(least_lack_s, (fit + 1) * each_s - room_s)
                while may_be and fit > (not mix) and not may_be((*mix, (weight, fit))):
                    fit -= 1
            if fit:
                full = min(count, left // fit)
                found.append(((*mix, (weight, fit)), full, room_s - fit * each_s))
                left -= full * fit
                count -= full
                if left and count:
                    found.append(((*mix, (weight, left)), 1, room_s - left * each_s))
                    left = 0
                    count -= 1
            if count and mix:
                found.append((mix, count, room_s))
        stages = found
    return [(mix, count) for mix, count, _ in stages], limit_s + least_lack_s


class Packing(NamedTuple):
    """Some branches divided into stages by time alone.

    Attributes:
        stacks: the branches of each stage, or of several where it is one branch.
        crew_index: the crew whose stages were filled; None if all branches are apart.
        least_devices: devices that they need at least.
        multiples: for every stack the possible micro-batches of its stage (see :class:`Crew`).
    """

    stacks: tuple[Stack, ...]
    crew_index: int | None
    least_devices: float
    multiples: frozenset[frozenset[int]]


class Bound(NamedTuple):
    """What a stage of some branches needs, or several stages of one branch.

    Attributes:
        num_devices: fewest devices; infinite where a stage of several branches is too slow.
        fast: crews of a stage that are fast enough, but for its messages.
        multiples: their micro-batches, or those of any crew for one branch.
    """

    num_devices: float
    fast: list[Crew]
    multiples: frozenset[int]


class Packings:
    """The packings that keep to one limit.

    Attributes:
        next_limit_s: up to this limit the packings and their bounds stay the same.
    """

    def __init__(self, space: Space, limit_s: float) -> None:
        self._space = space
        self._branches = space.branches
        self._limit_s = limit_s
        self._found: dict[Group, list[Packing]] = {}
        self._bounds: dict[Mix, Bound] = {}
        self._multiples = frozenset(crew.multiple for crew in space.crews)
        self.next_limit_s = math.inf

    def of(self, runs: Group) -> list[Packing]:
        """Packings of some branches for every crew, those that may need the fewest devices first.

        Branches that are too heavy for others beside them are on their own.
        """
        found = self._found.get(runs)
        if found is None:
            by_weight = self._branches.by_weight(runs).items()
            alone = self._packing([(((w, 1),), len(some)) for w, some in by_weight], None)
            found = self._found[runs] = [alone, *self._fitted(runs)]
            found.sort(key=_fewest_first)
        return found

    def _fitted(self, runs: Group) -> Iterator[Packing]:
        for index, loads in enumerate(self._branches.loads(runs) if len(runs) > 1 else ()):
            stacks, next_limit_s = first_fit(loads, self._limit_s)
            self._note(next_limit_s)
            if sum(count for _, count in stacks) < len(runs):
                yield self._packing(stacks, index)

    def _packing(self, stacks: Sequence[Stack], index: int | None) -> Packing:
        bounds = [self.bound(mix) for mix, _ in stacks]
        num_devices = sum(b.num_devices * count for b, (_, count) in zip(bounds, stacks))
        multiples = frozenset(bound.multiples for bound in bounds)
        return Packing(tuple(stacks), index, num_devices, multiples)

    def bound(self, mix: Mix) -> Bound:
        """What a stage of some branches needs at least."""
        found = self._bounds.get(mix)
        if found is None:
            is_one = len(mix) == 1 and mix[0][1] == 1
            new = self._of_branch(mix[0][0]) if is_one else self._of_one_stage(mix)
            found = self._bounds[mix] = new
        return found

    def _of_branch(self, weight: int) -> Bound:
        start, stop = self._branches.first[weight].interval
        work = self._space.work[stop] - self._space.work[start]
        num_devices = max(1, math.ceil(work / self._limit_s - 1e-6))
        if num_devices > 1:
            self._note(work / (num_devices - 1))
        return Bound(num_devices, [], self._multiples)

    def _of_one_stage(self, mix: Mix) -> Bound:
        fast = []
        for crew, seconds in zip(self._space.crews, self._branches.seconds(mix)):
            if seconds <= self._limit_s:
                fast.append(crew)
            else:
                self._note(seconds)
        num_devices = min((crew.num_replicas for crew in fast), default=math.inf)
        return Bound(num_devices, fast, frozenset(crew.multiple for crew in fast))

    def _note(self, limit_s: float) -> None:
        self.next_limit_s = min(self.next_limit_s, limit_s)


def _fewest_first(packing: Packing) -> float:
    return packing.least_devices


def groups_of(stacks: Sequence[Stack], by_weight: Mapping[int, Group]) -> list[Group]:
    """The branches of every stage.

    Args:
        stacks: how many branches of each weight stages hold, and how many stages there are.
        by_weight: the branches.
    """
    used = dict.fromkeys(by_weight, 0)
    groups = []
    for mix, count in stacks:
        for _ in range(count):
            group: Group = ()
            for weight, number in mix:
                first = used[weight]
                group += by_weight[weight][first : first + number]
                used[weight] += number
            groups.append(group)
    return groups
