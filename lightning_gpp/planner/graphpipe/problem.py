"""What a division of the model in a line prepares once: what its units cost, and the spaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import mul

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.graphpipe.place.unit_tables import UnitTables, places
from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.rates import Prices
from lightning_gpp.planner.graphpipe.space.space import Space
from lightning_gpp.planner.graphpipe.space.usage import DeviceCounts


@dataclass(frozen=True, eq=False)
class Problem:
    """The units of a model in a line; searches that have it in common find its prices once.

    Attributes:
        tables: of the units, in their order.
        known: prices in the place of those that follow from these.
        tries_all: whether divisions are not left out that are hardly ever the best ones.
        must_find: whether all divisions are tried where none is found, however long that takes.
    """

    tables: UnitTables
    known: Prices | None = None
    tries_all: bool = False
    must_find: bool = True

    @property
    def request(self) -> PlanRequest:
        """The question."""
        return self.tables.request

    @cached_property
    def prices(self) -> Prices:
        """What the units hold, exchange and take, in their order."""
        return self.known or Prices(self.request, self.tables.units, self.tables.order)

    @cached_property
    def with_sums_both_ways(self) -> tuple[Problem, ...]:
        """The same, and where there are replicas also with sums of gradients that cost nothing.

        Sums go on beside the backward. How much of them shows depends on the other stages, so the
        pace of a stage is between what it is with all of its sum and without: a search tries both.
        """
        if max(self.request.replica_counts(self.request.num_devices)) == 1:
            return (self,)
        prices = Prices(self.request, self.tables.units, self.tables.order, hides_sums=True)
        return self, replace(self, known=prices)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For every place, the places of the units that its unit reads from."""
        return tuple(tuple(places(needs)) for needs in self.tables.needs)

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
            self.tables.num_units,
            self.prices.rates(microbatch_size),
            [crew for crew in crews if num_replicas in (None, crew.num_replicas)],
            self.usage,
            num_units=num_units,
            holds_all=request.holds_all,
            memory_bytes=sum(map(mul, self.available, self.prices.memory_bytes)),
            may_recompute=request.may_recompute,
            tries_all=self.tries_all,
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
