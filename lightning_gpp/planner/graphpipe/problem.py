"""What a search prepares once: units, their tree, what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import mul

from lightning_gpp.graph.series_parallel import Leaf, Series, Tree, decompose, leaves
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.graphpipe.space.collapse import light_groups
from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.frames import Frames
from lightning_gpp.planner.graphpipe.space.layout import Layout, heavy_first, lay_out
from lightning_gpp.planner.graphpipe.space.rates import Prices
from lightning_gpp.planner.graphpipe.space.space import Space
from lightning_gpp.planner.graphpipe.space.usage import DeviceCounts
from lightning_gpp.planner.units.units import UnitGraph, build_units, indivisible_groups

MAX_UNITS = 120
"""Models of more units are made coarser."""

PARTS_PER_DEVICE = (16, 8, 4, 2)
"""A merged unit is at most this fraction of an equal share of a device; the finest that will do."""


@dataclass(frozen=True)
class Problem:
    """A request with the units of its model and a tree of them.

    Attributes:
        request: the question.
        units: what is never divided.
        tree: the order of the units that the search respects; finer than that of the model.
        added: edges between units that the model does not have.
        known: prices of another problem, which are used where they are of the same units in the
            same order.
        tries_all: whether divisions are not left out that are hardly ever the best ones, even if
            the model is large.
    """

    request: PlanRequest
    units: UnitGraph
    tree: Tree
    added: tuple[tuple[int, int], ...] = ()
    known: Prices | None = None
    tries_all: bool = False

    @cached_property
    def prices(self) -> Prices:
        """What the units hold, exchange and take, in the order of the tree."""
        order = tuple(leaves(self.tree))
        if self.known and self.known.request is self.request and self.known.order == order:
            return self.known
        return Prices(self.request, self.units, order)

    def with_sums_both_ways(self) -> tuple[Problem, ...]:
        """The same, and where there are replicas also with sums of gradients that cost nothing.

        Sums go on beside the backward. How much of them shows depends on the other stages, so the
        pace of a stage is between what it is with all of its sum and without: a search tries both.
        """
        if max(self.request.replica_counts(self.request.num_devices)) == 1:
            return (self,)
        prices = Prices(self.request, self.units, self.prices.order, hides_sums=True)
        return self, replace(self, known=prices)

    @cached_property
    def layout(self) -> Layout:
        """The tree as runs."""
        profiles = self.request.costs.profiles
        likeness: list[object] = [None] * len(self.units)
        for place, unit in enumerate(self.prices.order):
            names = self.units.operators[unit]
            times = tuple(profile.operators[name] for profile in profiles for name in names)
            likeness[unit] = self.prices.contents.likeness(place), times
        return lay_out(self.tree, likeness)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For every place, the places of the units that its unit reads from."""
        place, predecessors = self.layout.place, self.units.predecessors
        return tuple(
            tuple(place[source] for source in predecessors[unit]) for unit in self.layout.order
        )

    @cached_property
    def frames(self) -> Frames:
        """The places where stages begin and end."""
        return Frames(self.layout, tries_all=self.tries_all)

    @cached_property
    def usage(self) -> DeviceCounts:
        """Counts the devices that a way uses."""
        return DeviceCounts(self.available)

    @cached_property
    def available(self) -> tuple[int, ...]:
        """Devices of each kind."""
        kinds = [device.kind for device in self.request.cluster.devices]
        return tuple(kinds.count(kind) for kind in self.request.cluster.kinds)

    def space(
        self, microbatch_size: float, *, take_turns: bool = False, num_replicas: int | None = None
    ) -> Space:
        """The space of divisions with one smallest micro-batch.

        Args:
            microbatch_size: in samples.
            take_turns: whether replicas take whole micro-batches in turn, so that the stage takes
                as many at a time as it has replicas; otherwise they share each micro-batch.
            num_replicas: of every stage; any number if not given.
        """
        request = self.request
        num_units = round(request.minibatch_size / microbatch_size)
        crews = _crews(request, microbatch_size, num_units, self.available, take_turns=take_turns)
        return Space(
            self.frames,
            self.prices.rates(microbatch_size),
            [crew for crew in crews if num_replicas in (None, crew.num_replicas)],
            self.usage,
            num_units=num_units,
            holds_all=request.holds_all,
            memory_bytes=sum(map(mul, self.available, self.prices.memory_bytes)),
            may_recompute=request.may_recompute,
        )

    @cached_property
    def can_take_turns(self) -> bool:
        """Whether stages may have micro-batches of different sizes: all values can be split."""
        graph = self.request.graph
        has_one_size = self.request.num_microbatches is not None
        return not has_one_size and all(value.is_cuttable for value in graph.values.values())


def _crews(
    request: PlanRequest,
    microbatch_size: float,
    num_units: int,
    available: Sequence[int],
    *,
    take_turns: bool,
) -> list[Crew]:
    """Replicas on every kind that share a micro-batch in whole samples, or take turns."""
    shared = num_units if take_turns else microbatch_size
    return [
        Crew(num_replicas, kind, num_replicas if take_turns else 1)
        for kind, count in enumerate(available)
        for num_replicas in request.replica_counts(count)
        if num_replicas == 1 or not shared % num_replicas
    ]


def search_units(request: PlanRequest) -> UnitGraph:
    """The units that a search divides: operators, in large models light parts as one."""
    profile = request.profile(request.microbatch_sizes[-1])
    fine = build_units(request.graph, profile, indivisible_groups(request.graph))
    units, tree = fine, None
    for parts in PARTS_PER_DEVICE:
        if len(units) <= MAX_UNITS:
            break
        tree = tree or decompose(_with_ends(fine)).tree
        limit_s = sum(fine.compute_s) / (request.num_devices * parts)
        groups = light_groups(tree, fine.compute_s, limit_s)
        group_of = {
            name: number
            for number, group in enumerate(groups)
            for unit in group
            for name in fine.operators[unit]
        }
        units = build_units(request.graph, profile, group_of)
    return units


def branching(request: PlanRequest, units: UnitGraph) -> Problem:
    """The problem on the series-parallel tree of the model."""
    decomposition = decompose(_with_ends(units))
    tree = heavy_first(decomposition.tree, units.compute_s)
    return Problem(request, units, tree, decomposition.added)


def linear(
    request: PlanRequest,
    units: UnitGraph,
    order: Sequence[int],
    known: Prices | None = None,
    *,
    tries_all: bool = False,
) -> Problem:
    """The problem on a chain of the units."""
    parts = tuple(map(Leaf, order))
    tree = Series(parts) if len(parts) > 1 else parts[0]
    return Problem(request, units, tree, known=known, tries_all=tries_all)


def _with_ends(units: UnitGraph) -> list[tuple[int, ...]]:
    """Predecessors, where units that end without an output come before one that has one."""
    predecessors = list(units.predecessors)
    last = units.finals[-1]
    dead = [
        unit
        for unit, targets in enumerate(units.successors)
        if not targets and unit not in units.finals and unit < last
    ]
    predecessors[last] = tuple(sorted({*predecessors[last], *dead}))
    return predecessors
