"""Sets of units: their operators, and what they read of each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lightning_gpp.graph import FEED
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.graphpipe.place.depth_first import depth_first
from lightning_gpp.planner.graphpipe.place.draft import Units
from lightning_gpp.planner.units.units import (
    UnitGraph,
    build_units,
    indivisible_groups,
    output_makers,
)


class Crossing(NamedTuple):
    """What goes from one set of units to another.

    Attributes:
        values: names of the values; none: nothing.
        has_backward: whether gradients come back.
        is_cuttable: whether all of them can be cut by samples.
    """

    values: tuple[str, ...]
    has_backward: bool
    is_cuttable: bool


class UnitTables:
    """What sets of units are, each found once.

    Args:
        request: the question.

    Attributes:
        request: the question.
        units: the units in the order of the model.
        order: the unit at every place, depth first, one with an output last.
        num_units: how many there are.
        model_order: their places in the order of the model.
        everything: all units.
        makers: units that make an output of the model.
        fed: units that read an input of the model.
        compute_s: seconds of every unit on the first device, for the largest micro-batch.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        graph = request.graph
        profile = request.profile(request.microbatch_sizes[-1])
        units = build_units(graph, profile, indivisible_groups(graph))
        order = tuple(depth_first(_with_ends(units), units.compute_s))
        self.units, self.order = units, order
        place = {unit: at for at, unit in enumerate(order)}
        self.num_units = len(order)
        self.model_order = [place[unit] for unit in range(len(order))]
        self.everything: Units = (1 << len(order)) - 1
        self.compute_s = [units.compute_s[unit] for unit in order]
        self._place_of = {
            name: place[unit] for unit, names in enumerate(units.operators) for name in names
        }
        self.needs = [sum(1 << place[p] for p in units.predecessors[unit]) for unit in order]
        self.users = [sum(1 << place[s] for s in units.successors[unit]) for unit in order]
        self.makers: Units = self.units_of(output_makers(graph))
        self._ordered = [operator.name for operator in graph]
        self._operators: dict[Units, tuple[str, ...]] = {}
        self._seconds: dict[Units, float] = {}
        self._each_s: dict[tuple[float, str], list[float]] = {}
        self._sources: dict[Units, Units] = {}
        self._carried: dict[tuple[Units, Units, bool], Crossing] = {}
        self._own: dict[Units, tuple[str, ...]] = {}
        self._made = self._values_made()
        self._stateful: Units = self.units_of(op.name for op in graph if op.state)
        fed = [reader for _, producer, reader in graph.reads if producer is None]
        self.fed: Units = self.units_of(fed)
        self._readers = {name: self.units_of(ops) for name, ops in graph.readers.items()}

    def each_s(self, size: float, kind: str) -> list[float]:
        """Seconds of every unit for a micro-batch of some samples on a kind of device."""
        found = self._each_s.get((size, kind))
        if found is None:
            costs = self.request.profile(size, kind).operators
            found = self._each_s[size, kind] = [0.0] * self.num_units
            for name, place in self._place_of.items():
                found[place] += costs[name].forward_s + costs[name].backward_s
        return found

    def units_of(self, operators: Iterable[str]) -> Units:
        """The units that have some of these operators."""
        found = 0
        for name in operators:
            found |= 1 << self._place_of[name]
        return found

    def operators(self, units: Units) -> tuple[str, ...]:
        """Operators in the order of the model."""
        found = self._operators.get(units)
        if found is None:
            place_of = self._place_of
            found = tuple([n for n in self._ordered if units >> place_of[n] & 1])
            self._operators[units] = found
        return found

    def seconds(self, units: Units) -> float:
        """Seconds of some units, as those of :attr:`compute_s`."""
        found = self._seconds.get(units)
        if found is None:
            found = self._seconds[units] = sum([self.compute_s[at] for at in places(units)])
        return found

    def sources(self, units: Units) -> Units:
        """Other units that some units read from."""
        found = self._sources.get(units)
        if found is None:
            found = 0
            for at in places(units):
                found |= self.needs[at]
            found = self._sources[units] = found & ~units
        return found

    def has_state(self, units: Units) -> bool:
        """Whether a forward of them changes something, so that there can be no second one."""
        return bool(units & self._stateful)

    def carried(self, source: Units, target: Units, *, takes_outputs: bool) -> Crossing:
        """What goes from one set to another.

        Args:
            source: units, or none: the feed.
            target: units, perhaps none.
            takes_outputs: whether the outputs of the model go there, too.
        """
        key = source, target, takes_outputs
        found = self._carried.get(key)
        if found is None:
            graph = self.request.graph
            names = [
                name
                for at in (places(source) if source else (FEED,))
                for name, readers, is_output in self._made.get(at, ())
                if readers & target or (is_output and takes_outputs)
            ]
            found = self._carried[key] = Crossing(
                tuple(names),
                not graph.with_gradient.isdisjoint(names),
                all(graph.values[name].is_cuttable for name in names),
            )
        return found

    def own_parameters(self, units: Units) -> tuple[str, ...]:
        """Parameters that nobody else reads."""
        found = self._own.get(units)
        if found is None:
            own = [name for name, readers in self._readers.items() if not readers & ~units]
            found = self._own[units] = tuple(own)
        return found

    def _values_made(self) -> dict[int, list[tuple[str, Units, bool]]]:
        """Place (or feed) -> the values made there, with who reads them elsewhere."""
        graph = self.request.graph
        readers: dict[str, Units] = {}
        for name, _, reader in graph.reads:
            readers[name] = readers.get(name, 0) | 1 << self._place_of[reader]
        found: dict[int, list[tuple[str, Units, bool]]] = {}
        for name in graph.values:
            producer = graph.producer.get(name)
            at = FEED if producer is None else self._place_of[producer]
            is_output = name in graph.outputs
            if name in readers or is_output:
                found.setdefault(at, []).append((name, readers.get(name, 0), is_output))
        return found


def _with_ends(units: UnitGraph) -> list[tuple[int, ...]]:
    """Predecessors, where one unit with an output comes after all others that nobody reads."""
    predecessors = list(units.predecessors)
    last = units.finals[-1]
    ends = [unit for unit, users in enumerate(units.successors) if not users and unit != last]
    predecessors[last] = tuple(sorted({*predecessors[last], *ends}))
    return predecessors


def places(units: Units) -> Iterator[int]:
    """The places of some units, ascending.

    >>> list(places(0b1011))
    [0, 1, 3]
    """
    while units:
        low = units & -units
        yield low.bit_length() - 1
        units ^= low
