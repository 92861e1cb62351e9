"""A division of a model into stages as a local search changes it, and its way to a plan and back.

The units stand in one order; a part is a few intervals of it, and devices. Any plan whose stages
are made of whole units, each on devices of one kind, is such a division.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_gpp.planner.graphpipe.candidates.found_stage import FoundStage
from lightning_gpp.planner.graphpipe.candidates.placement import found_stage
from lightning_gpp.planner.graphpipe.candidates.search import Candidate, placed
from lightning_gpp.planner.graphpipe.divide.frontier import NO_OFFSET, units_in_flight
from lightning_gpp.planner.graphpipe.problem import Problem
from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.layout import Interval
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.units.dag import find_cycle

UNLIKELY = 1.02
"""With a step so many times too long on some devices, others are not tried."""


class Division(NamedTuple):
    """Which places are in which part, and on what.

    Attributes:
        stops: ``(stop, part)`` of every piece of the order, the first one from place 0; neighbours
            are of different parts. Parts are numbered as they appear.
        crews: the devices of each part.
        microbatch_size: samples of the smallest micro-batch.
    """

    stops: tuple[tuple[int, int], ...]
    crews: tuple[Crew, ...]
    microbatch_size: float

    @property
    def is_line(self) -> bool:
        """Whether every part is one interval."""
        return len(self.stops) == len(self.crews)

    def intervals(self) -> list[tuple[Interval, ...]]:
        """The places of each part."""
        found: list[list[Interval]] = [[] for _ in self.crews]
        start = 0
        for stop, part in self.stops:
            found[part].append((start, stop))
            start = stop
        return [tuple(pieces) for pieces in found]


def in_line(borders: Sequence[int], crews: Sequence[Crew], microbatch_size: float) -> Division:
    """The division with one interval for each part, between borders that begin with 0."""
    stops = tuple((stop, part) for part, stop in enumerate(borders[1:]))
    return Division(stops, tuple(crews), microbatch_size)


def tidied(
    stops: Iterable[tuple[int, int]], crews: Sequence[Crew], microbatch_size: float
) -> Division:
    """A division of pieces that may be empty, or continue the one before; parts may be gone."""
    pieces: list[tuple[int, int]] = []
    for stop, part in stops:
        if pieces and pieces[-1][1] == part:
            pieces[-1] = stop, part
        elif stop > (pieces[-1][0] if pieces else 0):
            pieces.append((stop, part))
    numbers: dict[int, int] = {}
    for _, part in pieces:
        numbers.setdefault(part, len(numbers))
    return Division(
        tuple((stop, numbers[part]) for stop, part in pieces),
        tuple(crews[part] for part in numbers),
        microbatch_size,
    )


def division_of(plan: Plan, problem: Problem) -> Division | None:
    """The division of a plan; None where it divides units, or a stage is on devices of two kinds.

    Raises:
        ValueError: the plan has no number of micro-batches.
    """
    request, place = problem.request, problem.layout.place
    if plan.num_microbatches is None:
        raise ValueError("the plan has no number of micro-batches")
    kinds = [request.cluster.kinds.index(device.kind) for device in request.cluster.devices]
    step = math.gcd(*(stage.microbatch_multiple for stage in plan.stages))
    home = {name: stage.id for stage in plan.stages for name in stage.operators}
    homes = [0] * len(place)
    for unit, names in enumerate(problem.units.operators):
        inside = {home[name] for name in names}
        if len(inside) > 1:
            return None
        (homes[place[unit]],) = inside
    crews = []
    for stage in plan.stages:
        kind = {kinds[device] for device in stage.devices}
        if len(kind) > 1:
            return None
        crews.append(Crew(stage.num_replicas, kind.pop(), stage.microbatch_multiple // step))
    stops = ((at + 1, part) for at, part in enumerate(homes))
    return tidied(stops, crews, request.minibatch_size / plan.num_microbatches * step)


@dataclass(frozen=True)
class Divider:
    """Makes candidates of divisions of one problem.

    Attributes:
        problem: what is divided.
        name: of the planner.
        is_chain: whether every stage waits for the one before it.
    """

    problem: Problem
    name: str
    is_chain: bool

    @property
    def num_places(self) -> int:
        """Units of the model."""
        return len(self.problem.layout.order)

    @cached_property
    def _links(self) -> list[tuple[int, int]]:
        """Places that exchange values; all ends count as read by the last place."""
        place = self.problem.layout.place
        links = [
            (place[source], place[unit])
            for unit, sources in enumerate(self.problem.units.predecessors)
            for source in sources
        ]
        last = self.num_places - 1
        ends = set(range(last)).difference(source for source, _ in links)
        return sorted({*links, *((end, last) for end in ends)})

    @cached_property
    def _allowed(self) -> dict[tuple[Crew, float], bool]:
        return {}

    def may(self, crew: Crew, microbatch_size: float) -> bool:
        """Whether a stage may have a crew: its replicas take whole samples, or whole units."""
        found = self._allowed.get((crew, microbatch_size))
        if found is None:
            found = self._allowed[crew, microbatch_size] = self._may(crew, microbatch_size)
        return found

    def _may(self, crew: Crew, microbatch_size: float) -> bool:
        request, (num_replicas, kind, multiple) = self.problem.request, crew
        if num_replicas not in request.replica_counts(self.problem.available[kind]):
            return False
        if round(request.minibatch_size / microbatch_size) % multiple:
            return False
        if multiple > 1 and not self.problem.can_take_turns:
            return False
        return not multiple % num_replicas or not microbatch_size * multiple % num_replicas

    def candidates(self, division: Division, at_most_s: float = math.inf) -> Iterator[Candidate]:
        """What a search makes of a division, with devices given out in different ways.

        None where the division cannot be, or not in the memory.

        Args:
            division: the division.
            at_most_s: one with a longer step is of no interest.
        """
        size = division.microbatch_size
        if size not in self.problem.request.microbatch_sizes or not self._has_devices(division):
            return
        if not all(self.may(crew, size) for crew in division.crews):
            return
        if self._computes_s(division) > at_most_s:
            return
        stages = self._stages(division)
        if stages is not None:
            for candidate in placed(
                self.problem, stages, size, self.name, is_chain=self.is_chain, enough_s=at_most_s
            ):
                if candidate.least_s < at_most_s:
                    yield candidate
                elif candidate.least_s > UNLIKELY * at_most_s:
                    break

    def _stages(self, division: Division) -> list[FoundStage] | None:
        """The stages of a division; None where they would wait for each other, or do not fit."""
        after = self._successors(division)
        if not division.is_line and find_cycle(after):
            return None
        units = self._units_in_flight(division, after)
        stages = []
        for intervals, crew, held in zip(division.intervals(), division.crews, units):
            stage = self._stage(intervals, crew, held, division.microbatch_size)
            if stage is None:
                return None
            stages.append(stage)
        return sorted(stages, key=lambda stage: stage.places)

    def _computes_s(self, division: Division) -> float:
        """Seconds that the slowest stage computes in a step without recomputation."""
        minibatch_size = self.problem.request.minibatch_size
        rates = self.problem.prices.rates(division.microbatch_size)
        longest_s = 0.0
        for intervals, crew in zip(division.intervals(), division.crews):
            sums = rates.seconds(crew)
            compute_s = sum(sums[stop] - sums[start] for start, stop in intervals)
            count = minibatch_size / (division.microbatch_size * crew.multiple)
            longest_s = max(longest_s, compute_s * count)
        return longest_s

    def _has_devices(self, division: Division) -> bool:
        used = [0] * len(self.problem.available)
        for crew in division.crews:
            used[crew.kind] += crew.num_replicas
        return all(count <= most for count, most in zip(used, self.problem.available))

    def _stage(
        self, intervals: tuple[Interval, ...], crew: Crew, units: int, microbatch_size: float
    ) -> FoundStage | None:
        """A stage, recomputed where it does not fit otherwise; None where it cannot be."""
        request, rates = self.problem.request, self.problem.prices.rates(microbatch_size)
        rate = rates(intervals, crew)
        count = round(request.minibatch_size / microbatch_size)
        in_flight = (count if request.holds_all else min(units, count)) // crew.multiple
        recompute = in_flight > rate.most_in_flight
        seconds = rate.recomputed_seconds_per_sample if recompute else rate.seconds_per_sample
        most = rate.recomputed_most_in_flight if recompute else rate.most_in_flight
        if in_flight > most or math.isinf(seconds):
            return None
        return found_stage(rates, intervals, crew, units, recompute=recompute)

    def _units_in_flight(self, division: Division, after: Mapping[int, set[int]]) -> list[int]:
        """Smallest micro-batches in flight of each part, given the parts behind it."""
        multiples = [crew.multiple for crew in division.crews]
        last = division.stops[-1][1]
        held: dict[int, int] = {}

        def hold(part: int) -> int:
            if part in held:
                return held[part]
            need, offset = 0, NO_OFFSET
            for target in after[part]:
                units = hold(target)
                need = max(need, units + multiples[target])
                offset = max(offset, units - multiples[target])
            found = units_in_flight(need, offset, multiples[part])
            if part == last and division.crews[part].num_replicas > 1:
                found = 2 * multiples[part]  # the loss of replicas has a stage of its own
            held[part] = found
            return found

        return [hold(part) for part in range(len(multiples))]

    def _successors(self, division: Division) -> dict[int, set[int]]:
        homes: list[int] = []
        for stop, part in division.stops:
            homes += [part] * (stop - len(homes))
        after: dict[int, set[int]] = {part: set() for part in range(len(division.crews))}
        for source, target in self._links:
            if homes[source] != homes[target]:
                after[homes[source]].add(homes[target])
        if self.is_chain:
            for part in range(1, len(division.crews)):
                after[part - 1].add(part)
        return after
