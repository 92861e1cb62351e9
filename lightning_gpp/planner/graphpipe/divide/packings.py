"""The packings of branches beside an owner that are fast enough, and what they need at least."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lightning_gpp.planner.graphpipe.divide.packing import Stack, first_fit
from lightning_gpp.planner.graphpipe.space.branches import Group, Mix, is_one
from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.space import Space
from lightning_gpp.planner.graphpipe.tolerances import DEVICES


class Packing(NamedTuple):
    """Some branches divided into stages by time alone.

    Attributes:
        stacks: the branches of each stage, or of several where it is one branch.
        crew_index: the crew whose stages were filled; None if all branches are apart.
        least_devices: devices that they need at least.
        multiples: for every stack the possible micro-batches of its stage (see :class:`Crew`).
    """

    stacks: Sequence[Stack]
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
        next_limit_s: up to this limit the packings, their bounds, and the devices that they may
            use, stay the same.
    """

    def __init__(self, space: Space, limit_s: float) -> None:
        self._space = space
        self._branches = space.branches
        self._limit_s = limit_s
        self._found: dict[Group, tuple[int, list[Packing]]] = {}
        self._bounds: dict[Mix, Bound] = {}
        self._multiples = frozenset(crew.multiple for crew in space.crews)
        self.next_limit_s = math.inf

    def of(self, runs: Group) -> tuple[int, list[Packing]]:
        """Packings of some branches for every crew, those that may need the fewest devices first.

        Branches that are too heavy for others beside them are on their own.

        Returns:
            Devices that the branches may use, and the packings that may do with them.
        """
        found = self._found.get(runs)
        if found is None:
            by_weight = self._branches.by_weight(runs)
            alone = [(((weight, 1),), len(some)) for weight, some in by_weight.items()]
            packings = [self._packing(alone, None), *self._fitted(runs)]
            packings.sort(key=_fewest_first)
            most = self._most_devices(by_weight, packings[-1].least_devices)
            possible = [packing for packing in packings if packing.least_devices <= most]
            found = self._found[runs] = most, possible
        return found

    def _most_devices(self, by_weight: Mapping[int, Group], needed: float) -> int:
        """Devices that branches may use, so that the rest of the model finds some, too."""
        rest = self._space.work[-1]
        for weight, some in by_weight.items():
            rest -= len(some) * self._branches.work[weight]
        num_devices = self._space.usage.num_devices
        most = int(num_devices - rest / self._limit_s + DEVICES)
        if most < min(needed, num_devices - 1):
            self._note(rest / (num_devices - most - 1))  # the limit for one device more
        return most

    def _fitted(self, runs: Group) -> Iterator[Packing]:
        for index, loads in enumerate(self._branches.loads(runs) if len(runs) > 1 else ()):
            stacks, next_limit_s = first_fit(loads, self._limit_s)
            self._note(next_limit_s)
            if sum(count for _, count in stacks) < len(runs):
                yield self._packing(stacks, index)

    def _packing(self, stacks: Sequence[Stack], crew_index: int | None) -> Packing:
        num_devices, multiples = 0.0, set()
        for mix, count in stacks:
            bound = self.bound(mix)
            num_devices += count * bound.num_devices
            multiples.add(bound.multiples)
        return Packing(stacks, crew_index, num_devices, frozenset(multiples))

    def bound(self, mix: Mix) -> Bound:
        """What a stage of some branches needs at least."""
        found = self._bounds.get(mix)
        if found is None:
            new = self._of_branch(mix[0][0]) if is_one(mix) else self._of_one_stage(mix)
            found = self._bounds[mix] = new
        return found

    def _of_branch(self, weight: int) -> Bound:
        work = self._branches.work[weight]
        num_devices = max(1, math.ceil(work / self._limit_s - DEVICES))
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
        num_devices = min([crew.num_replicas for crew in fast], default=math.inf)
        multiples = self._multiples
        if len(multiples) > 1:
            multiples = frozenset([crew.multiple for crew in fast])
        return Bound(num_devices, fast, multiples)

    def _note(self, limit_s: float) -> None:
        self.next_limit_s = min(self.next_limit_s, limit_s)


def _fewest_first(packing: Packing) -> float:
    return packing.least_devices
