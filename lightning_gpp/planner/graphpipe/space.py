"""What may be chosen with one smallest micro-batch, and lower bounds of what that takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from lightning_gpp.cluster import all_reduce_s
from lightning_gpp.common.cached_method import cached_method
from lightning_gpp.planner.graphpipe.draft import UnitTables, places
from lightning_gpp.planner.graphpipe.rates import Contents, Crew, CrewRates


class Problem:
    """The units of a model in a line: what searches for divisions have in common, found once.

    Args:
        tables: of the units, in their order.

    Attributes:
        available: devices of each kind.
        usage: counts the devices that a way uses.
        contents: what stages hold and exchange.
        memory_bytes: memory of a device of each kind, the smallest; infinite where it is not known.
    """

    def __init__(self, tables: UnitTables) -> None:
        self.tables, self.request = tables, tables.request
        cluster = self.request.cluster
        kinds = [device.kind for device in cluster.devices]
        self.available = tuple(kinds.count(kind) for kind in cluster.kinds)
        self.usage = DeviceCounts(self.available)
        self.contents = Contents(tables)
        self.memory_bytes = tuple(
            min(
                math.inf if device.memory_bytes is None else device.memory_bytes
                for device in cluster.devices
                if device.kind == kind
            )
            for kind in cluster.kinds
        )

    @cached_property
    def spaces(self) -> list[Space]:
        """All spaces: stages all have as many replicas, or any, or replicas take turns.

        Sums of gradients go on beside the backward. How much of them shows depends on the other
        stages, so the pace of a stage is between what it is with all of its sum and without: both
        are tried where there are replicas.
        """
        request, found = self.request, []
        has_replicas = max(request.replica_counts(request.num_devices)) > 1
        values = request.graph.values.values()
        can_differ = request.num_microbatches is None and all(one.is_cuttable for one in values)
        for hides_sums in (False, True)[: 1 + has_replicas]:
            for size in request.microbatch_sizes:
                found.append(self.space(size, hides_sums=hides_sums))
                for count in request.replica_counts(max(self.available)):
                    if count == 1 or not size % count:
                        found.append(self.space(size, num_replicas=count, hides_sums=hides_sums))
                if can_differ:
                    found.append(self.space(size, take_turns=True, hides_sums=hides_sums))
        return found

    def space(
        self,
        microbatch_size: float,
        *,
        take_turns: bool = False,
        num_replicas: int | None = None,
        hides_sums: bool = False,
        trials: Trials | None = None,
    ) -> Space:
        """The space of divisions with one smallest micro-batch.

        Args:
            microbatch_size: in samples.
            take_turns: whether replicas take whole micro-batches in turn, so that the stage takes
                as many at a time as it has replicas; otherwise they share each micro-batch in whole
                samples.
            num_replicas: of every stage; any number if not given.
            hides_sums: whether sums of gradients are taken to cost nothing.
            trials: how many stages of any length are tried; if not given, the longest ones alone.
        """
        count = round(self.request.minibatch_size / microbatch_size)
        shared = count if take_turns else microbatch_size
        rates = {}
        for kind, available in enumerate(self.available):
            for count in self.request.replica_counts(available):
                if (count == 1 or not shared % count) and num_replicas in (None, count):
                    crew = Crew(count, kind, count if take_turns else 1)
                    rates[crew] = self._crew_rates(crew, microbatch_size, hides_sums)
        return Space(self, microbatch_size, rates, trials)

    @cached_method
    def _crew_rates(self, crew: Crew, microbatch_size: float, hides_sums: bool) -> CrewRates:
        line = (0.0, 0.0) if hides_sums else self._reduce_line(crew.num_replicas)
        memory_bytes = self.memory_bytes[crew.kind]
        return CrewRates(self.contents, crew, microbatch_size, memory_bytes, line)

    @cached_method
    def _reduce_line(self, num_replicas: int) -> tuple[float, float]:
        """Seconds in which neighbours sum gradients: at least, and per byte."""
        cluster, devices = self.request.cluster, range(num_replicas)
        one_s, many_s = (all_reduce_s(cluster, devices, n, "ring") for n in (1, 10**15))
        per_byte_s = (many_s - one_s) / (10**15 - 1)
        return max(0.0, one_s - per_byte_s), per_byte_s

    @cached_property
    def sources(self) -> list[list[int]]:
        """For every place, the places of the units that its unit reads from."""
        return [[*places(needs)] for needs in self.tables.needs]


class Trials:
    """Stages that searches for any division may try, so that they end: some seconds.

    Attributes:
        left: how many more.
    """

    def __init__(self, left: int = 500_000) -> None:
        self.left = left


class LeastStep(NamedTuple):
    """Lower bounds of a step in one space, taken as a fill and cycles.

    A step is a fill, the first micro-batch on its way through all units that depend on each other,
    and then a cycle of the slowest stage for every other micro-batch. Where the slowest stage is
    beside the longest way, or far from its end, a step may be a little shorter than that.

    Attributes:
        fill_s: seconds of the longest way of the first micro-batch, on the fastest devices.
        samples: samples of the other micro-batches, where they are the largest.
        step_s: the least step. More replicas make the fill shorter and, as they are less
            efficient, the cycles longer; here every unit has the best number for itself.
    """

    fill_s: float
    samples: float
    step_s: float

    def bottleneck_s(self, step_s: float) -> float:
        """Seconds per sample of the slowest stage above which every step is longer."""
        return (step_s - self.fill_s) / self.samples if self.samples > 0 else math.inf


class Space:
    """The divisions of a line to choose from with one smallest micro-batch.

    Attributes:
        rates: what stages take on the devices that they may have.
    """

    def __init__(
        self,
        problem: Problem,
        microbatch_size: float,
        rates: dict[Crew, CrewRates],
        trials: Trials | None,
    ) -> None:
        self.problem, self.microbatch_size, self.rates = problem, microbatch_size, rates
        self.trials = trials
        self.num_places, self.usage = problem.tables.num_units, problem.usage
        self._num_units = round(problem.request.minibatch_size / microbatch_size)

    def in_flight(self, units: int, crew: Crew) -> int:
        """Micro-batches of a stage in flight: no more than there are."""
        holds_all = self.problem.request.holds_all
        most = self._num_units if holds_all else min(units, self._num_units)
        return most // crew.multiple

    @cached_property
    def work(self) -> list[float]:
        """Running sums over the places of device-seconds per sample that units take at least."""
        rows = [
            [crew.num_replicas * one for one in own.least_each] for crew, own in self.rates.items()
        ]
        return [*accumulate(columns_min(rows), initial=0.0)]

    @cached_property
    def lower_bound_s(self) -> float:
        """Seconds per sample that no division can beat: equal shares, or the slowest units."""
        each_s = columns_min([own.least_each for own in self.rates.values()])
        num_stages = self.usage.num_devices // min(crew.num_replicas for crew in self.rates)
        slowest_s = crowded_s(each_s, num_stages) if len(self.rates) == 1 else max(each_s)
        return max(self.work[-1] / self.usage.num_devices, slowest_s)

    @cached_property
    def least(self) -> LeastStep:
        """The lower bounds of a step."""
        problem = self.problem
        samples = problem.request.minibatch_size - self.microbatch_size * max(
            crew.multiple for crew in self.rates
        )
        fastest = columns_min([own.each for own in self.rates.values()])
        way = _longest_way(problem.sources, fastest)
        rows = []
        for crew, own in self.rates.items():
            share = samples * crew.num_replicas / self.usage.num_devices
            row = [share * work_s for work_s in own.least_each]
            for place in way:
                row[place] += own.each[place]
            rows.append(row)
        fill_s = sum(fastest[place] for place in way)
        step_s = max(sum(columns_min(rows)), fill_s + samples * self.lower_bound_s)
        return LeastStep(fill_s, samples, step_s)


class DeviceCounts:
    """Devices in use, by kind, packed into one integer, so that a search compares them fast.

    Each kind of device has a field of bits with a guard bit on top: ``a`` is nowhere more than
    ``b`` iff no guard bit is borrowed by ``b + guards - a``.

    >>> usage = DeviceCounts((4, 2))
    >>> one = usage.of(3, kind=0) + usage.of(1, kind=1)
    >>> usage.fits(one, most=6), usage.fits(one + usage.of(2, kind=1), most=6)
    (True, False)
    """

    def __init__(self, available: Sequence[int]) -> None:
        self.num_devices = sum(available)
        self._bits = self.num_devices.bit_length() + 2  # of a field: twice as many, and the guard
        self._guards = sum(self.of(1, kind) << self._bits - 1 for kind in range(len(available)))
        self._available = sum(self.of(count, kind) for kind, count in enumerate(available))
        self._has_one_kind = len(available) == 1

    def of(self, count: int, kind: int) -> int:
        """A number of devices of one kind."""
        return count << (self._bits * kind)

    def fits(self, used: int, most: int) -> bool:
        """Whether no more is used than there is of each kind, and than ``most`` in all."""
        if self._has_one_kind:
            return used <= most
        return self.total(used) <= most and self.is_no_more(used, self._available)

    def is_no_more(self, used: int, other: int) -> bool:
        """Whether of no kind more devices are used than others use."""
        return ((other | self._guards) - used) & self._guards == self._guards

    def total(self, used: int) -> int:
        """Devices in use."""
        if self._has_one_kind:
            return used
        total = 0
        while used:
            total += used & (1 << self._bits) - 1
            used >>= self._bits
        return total


def crowded_s(each_s: Sequence[float], num_stages: int) -> float:
    """Seconds that some stage takes at least: of more units than stages, two are in one.

    And of more than twice as many units three, and so on; so it holds at least the lightest of the
    heaviest that cannot be without such company.

    Args:
        each_s: seconds of every unit.
        num_stages: most stages.

    >>> crowded_s([4, 3, 3, 2], num_stages=2), crowded_s([5, 1], num_stages=2)
    (6, 5)
    """
    heaviest = sorted(each_s, reverse=True)
    return max(
        sum(heaviest[first - first // num_stages : first + 1])
        for first in range(0, len(heaviest), num_stages)
    )


def columns_min(rows: Sequence[Sequence[float]]) -> Sequence[float]:
    """The least of every column of some rows."""
    return list(map(min, *rows)) if len(rows) > 1 else rows[0]


def _longest_way(sources: Sequence[Sequence[int]], seconds: Sequence[float]) -> list[int]:
    """The places on the longest way through units that depend on each other, the last one first.

    Args:
        sources: of the unit at every place.
        seconds: likewise.
    """
    until: list[float] = []
    before: list[int | None] = []
    for own_s, others in zip(seconds, sources):
        source = max(others, key=until.__getitem__) if others else None
        before.append(source)
        until.append(own_s if source is None else own_s + until[source])
    place: int | None = max(range(len(until)), key=until.__getitem__)
    way = []
    while place is not None:
        way.append(place)
        place = before[place]
    return way
