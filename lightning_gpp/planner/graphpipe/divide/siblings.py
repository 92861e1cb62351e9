"""The branches beside the owner of a block: each cut on its own, or several whole ones together.

Light branches share a stage. With few branches all groups are tried; with many, they are packed
(see :mod:`lightning_gpp.planner.graphpipe.divide.packing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from lightning_gpp.planner.graphpipe.divide.frontier import (
    NO_OFFSET,
    Alike,
    Cut,
    Way,
    add_way,
    units_in_flight,
)
from lightning_gpp.planner.graphpipe.divide.limit import Limit
from lightning_gpp.planner.graphpipe.divide.packing import Stack, first_fit, groups_of
from lightning_gpp.planner.graphpipe.divide.packings import Packing, Packings
from lightning_gpp.planner.graphpipe.space.branches import Group, Mix, is_one
from lightning_gpp.planner.graphpipe.space.layout import ElementRun, Interval
from lightning_gpp.planner.graphpipe.space.space import Space

FEW_BRANCHES = 6
"""In small models, up to this many branches are grouped in all ways."""

NOTHING = Way(0, NO_OFFSET, 0, (), None)
"""No branches at all: they ask for nothing to be in flight."""


class Siblings:
    """Finds, for one limit, the ways of the branches beside owners.

    Args:
        space: what may be chosen.
        limit: most seconds per sample of a stage.
        side: the ways to divide one branch, given what follows it.
    """

    def __init__(
        self, space: Space, limit: Limit, side: Callable[[ElementRun, Way], list[Way]]
    ) -> None:
        self._limit = limit
        self._side = side
        self._space = space
        self._branches = space.branches
        self._packings = Packings(space, limit.limit_s)
        self._multiples = sorted({crew.multiple for crew in space.crews})
        self._ways: dict[tuple[Group, int, int], list[Way]] = {}
        self._options_of: dict[tuple[Mix, int, int], list[Way]] = {}

    def ways(self, runs: Group, need: int, offset: int) -> list[Way]:
        """The ways to divide some branches.

        Args:
            runs: the branches.
            need: units in flight that a stage before what follows them needs (see :class:`Way`).
            offset: likewise.
        """
        key = runs, need, offset
        found = self._ways.get(key)
        if found is None:
            found = self._ways[key] = []
            if self._space.is_small and len(runs) <= FEW_BRANCHES:
                self._all_groups(runs, need, offset, NOTHING, found)
            else:
                self._packed(runs, need, offset, found)
            self._limit.too_slow(self._packings.next_limit_s)
        return found

    def _all_groups(self, runs: Group, need: int, offset: int, done: Way, ways: list[Way]) -> None:
        """Every grouping of branches; the first one with any of the others."""
        if not runs:
            add_way(ways, done, self._space.usage)
            return
        first, others = runs[0], runs[1:]
        for size in range(len(others) + 1):
            for more in combinations(others, size):
                left = tuple(run for run in others if run not in more)
                by_weight = self._branches.by_weight((first, *more))
                mix = tuple((weight, len(some)) for weight, some in by_weight.items())
                for option in self._options(mix, by_weight, need, offset):
                    way = self._plus(done, option, [(first, *more)])
                    self._all_groups(left, need, offset, way, ways)

    def _packed(self, runs: Group, need: int, offset: int, ways: list[Way]) -> None:
        """Branches packed into stages of one crew, for each crew."""
        flights = {m: units_in_flight(need, offset, m) for m in self._multiples}
        most, packings = self._packings.of(runs)
        for packing in packings:
            if not self._is_beaten(packing, flights, ways):
                stacks = self._with_memory(packing, runs, flights)
                for way in self._divided(runs, stacks, need, offset, most):
                    add_way(ways, way, self._space.usage)

    def _is_beaten(self, packing: Packing, flights: Mapping[int, int], ways: list[Way]) -> bool:
        """Whether a way is at least as good as any one of a packing."""
        if not self._space.usage.has_one_kind:
            return False
        fewer = [way for way in ways if way.used <= packing.least_devices]
        if not fewer:
            return False
        need = max([min([flights[m] + m for m in some]) for some in packing.multiples])
        offset = max([min([flights[m] - m for m in some]) for some in packing.multiples])
        return any(way.need <= need and way.offset <= offset for way in fewer)

    def _with_memory(
        self, packing: Packing, runs: Group, flights: Mapping[int, int]
    ) -> Sequence[Stack]:
        """The stages of a packing, or others where they do not find enough memory.

        What a stage of branches holds and sends only grows with it. So the stages that are found
        by time alone are right unless one of them does not fit.
        """
        if packing.crew_index is None:
            return packing.stacks
        by_weight = self._branches.by_weight(runs)
        crew = self._space.crews[packing.crew_index]

        def fits(mix: Mix) -> bool:
            places = self._branches.places(mix, by_weight)
            return self._limit.fits(places, crew, flights[crew.multiple])

        if all(is_one(mix) or fits(mix) for mix, _ in packing.stacks):
            return packing.stacks
        loads = self._branches.loads(runs)[packing.crew_index]
        stacks, next_limit_s = first_fit(loads, self._limit.limit_s, fits)
        self._limit.too_slow(next_limit_s)
        return stacks

    def _divided(
        self, runs: Group, stacks: Sequence[Stack], need: int, offset: int, most: int
    ) -> list[Way]:
        """The ways of some stages: those that are alike are divided alike."""
        usage = self._space.usage
        by_weight = self._branches.by_weight(runs)
        found = [NOTHING]
        for (mix, _), groups in zip(stacks, groups_of(stacks, by_weight)):
            longer: list[Way] = []
            for option in self._options(mix, by_weight, need, offset):
                for one in found:
                    way = self._plus(one, option, groups)
                    if usage.fits(way.used, most):
                        add_way(longer, way, usage)
            found = longer
        return found

    def _options(
        self, mix: Mix, by_weight: Mapping[int, Group], need: int, offset: int
    ) -> list[Way]:
        """The ways of one branch, or of several in one stage, whichever of those alike they are."""
        key = mix, need, offset
        found = self._options_of.get(key)
        if found is None:
            if is_one(mix):
                (run, *_) = by_weight[mix[0][0]]
                found = self._side(run, Way(need, offset, 0, (), None))
            else:
                places = self._branches.places(mix, by_weight)
                found = self._of_stage(mix, places, need, offset)
            self._options_of[key] = found
        return found

    def _of_stage(
        self, mix: Mix, places: tuple[Interval, ...], need: int, offset: int
    ) -> list[Way]:
        ways: list[Way] = []
        kinds = set()
        for crew in self._packings.bound(mix).fast:
            units = units_in_flight(need, offset, crew.multiple)
            if crew.kind not in kinds and self._limit.fits(places, crew, units):
                kinds.add(crew.kind)
                used = self._space.usage.of(crew.num_replicas, crew.kind)
                cut = Cut(places, crew, units, None)
                way = Way(units + crew.multiple, units - crew.multiple, used, (), cut)
                add_way(ways, way, self._space.usage)
        return ways

    def _plus(self, one: Way, option: Way, groups: list[Group]) -> Way:
        """A way, and beside it branches that are all divided alike."""
        assert option.trace is not None
        origin = self._space.side_frame(groups[0][0]).run.start if len(groups[0]) == 1 else 0
        return Way(
            max(one.need, option.need),
            max(one.offset, option.offset),
            one.used + len(groups) * option.used,
            (),
            Alike(option.trace, origin, groups, one.trace),
        )
