"""What stages made of given units hold and exchange, whatever the size of their micro-batches.

The units that read a value outside the stage are taken to be in different stages unless one of them
follows the other, which only a whole plan tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_gpp.graph import FEED, ModelGraph
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.edge_bytes import EdgeBytes, edge_bytes
from lightning_gpp.planner.graphpipe.layout import Interval
from lightning_gpp.planner.units import UnitGraph

Intervals = tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class UnitFlow:
    """A value between units: who makes it, who reads it, its bytes, whether it can be cut."""

    source: int
    targets: tuple[int, ...]
    size: EdgeBytes
    is_cuttable: bool = True


def unit_flows(graph: ModelGraph, units: UnitGraph) -> tuple[UnitFlow, ...]:
    """The values that leave a unit or come from the feed."""
    unit_of = {name: unit for unit, names in enumerate(units.operators) for name in names}
    readers: dict[str, set[int]] = {}
    for operator in graph:
        for name in operator.inputs:
            readers.setdefault(name, set()).add(unit_of[operator.name])
    needs_grad = {item.value.name for item in graph.inputs if item.requires_grad}
    flows = []
    for name, targets in readers.items():
        source = unit_of[graph.producer[name]] if name in graph.producer else FEED
        others = tuple(sorted(targets - {source}))
        if others:
            has_backward = source != FEED or name in needs_grad
            size = edge_bytes(graph, (name,), has_backward=has_backward)
            flows.append(UnitFlow(source, others, size, graph.values[name].is_cuttable))
    return tuple(flows)


@dataclass(frozen=True, slots=True)
class Content:
    """What a set of units holds and exchanges, whatever the size of its micro-batches.

    Attributes:
        kept_bytes: parameters, gradients and optimizer state.
        gradient_bytes: gradients.
        has_state: whether it must neither be replicated nor run its forward twice.
        is_whole: whether it exchanges values that cannot be cut by samples, as replicas would need.
        sent: what it sends: activations forward and gradients back.
        received: what it receives.
        inputs: the activations that it receives.
        num_sent: messages that it sends for a micro-batch.
        num_received: messages that it receives.
    """

    kept_bytes: int
    gradient_bytes: int
    has_state: bool
    is_whole: bool
    sent: tuple[float, float]
    received: tuple[float, float]
    inputs: tuple[float, float]
    num_sent: int
    num_received: int


class Contents:
    """The contents of stages by their intervals, each found once."""

    def __init__(self, request: PlanRequest, units: UnitGraph, order: Sequence[int]) -> None:
        self._request = request
        place = {unit: position for position, unit in enumerate(order)}
        self._parameters = [
            frozenset(
                n for name in units.operators[u] for n in request.graph.operator[name].parameters
            )
            for u in order
        ]
        self._has_state = [
            any(request.graph.operator[name].state for name in units.operators[unit])
            for unit in order
        ]
        values = request.graph.values
        whole_outputs = {name for name in request.graph.outputs if not values[name].is_cuttable}
        self._is_whole = [
            any(
                value.name in whole_outputs
                for name in units.operators[unit]
                for value in request.graph.operator[name].outputs
            )
            for unit in order
        ]
        self._is_whole_flow: list[bool] = []
        self._inward: list[list[int]] = [[] for _ in order]
        self._outward: list[list[int]] = [[] for _ in order]
        self._flows: list[tuple[int, tuple[int, ...], EdgeBytes]] = []
        for flow in unit_flows(request.graph, units):
            source = FEED if flow.source == FEED else place[flow.source]
            targets = tuple(sorted(place[target] for target in flow.targets))
            for target in targets:
                self._inward[target].append(len(self._flows))
            if source != FEED:
                self._outward[source].append(len(self._flows))
            self._flows.append((source, targets, flow.size))
            self._is_whole_flow.append(not flow.is_cuttable)
        before: list[int] = [0] * len(order)
        for position, unit in enumerate(order):
            for source in units.predecessors[unit]:
                before[position] |= before[place[source]] | 1 << place[source]
        self._before = before
        self._found: dict[Intervals, Content] = {}
        self._of_branch: dict[Interval, tuple[Content, frozenset[object]]] = {}
        self.gradient_bytes = self._running_gradient_bytes()

    def _running_gradient_bytes(self) -> list[int]:
        """Running sums over the places, of parameters that no earlier place has."""
        known: set[str] = set()
        sums = [0]
        for names in self._parameters:
            parameters = [self._request.graph.parameter[name] for name in names - known]
            sums.append(sums[-1] + sum(p.size_bytes for p in parameters if p.requires_grad))
            known |= names
        return sums

    def likeness(self, place: int) -> object:
        """What must be equal for two units to stand for each other, apart from their times."""
        own = self._parameters[place]
        graph = self._request.graph
        sizes = sorted(
            (graph.parameter[n].size_bytes, graph.parameter[n].requires_grad) for n in own
        )
        inward = sorted(
            (self._is_whole_flow[flow], _key(self._flows[flow][2])) for flow in self._inward[place]
        )
        outward = sorted(
            (len(self._flows[flow][1]), self._is_whole_flow[flow], _key(self._flows[flow][2]))
            for flow in self._outward[place]
        )
        flags = self._has_state[place], self._is_whole[place]
        return tuple(sizes), flags, tuple(inward), tuple(outward)

    def of_branch(self, interval: Interval) -> tuple[Content, frozenset[object]]:
        """What must be equal for two branches of a block to stand for each other in any stage.

        What a stage of several branches holds and exchanges is the sum of what they do, less what
        several of them share.

        Returns:
            The content of the branch, and all that it shares with places outside: parameters,
            values that it reads, and who sends them.
        """
        found = self._of_branch.get(interval)
        if found is None:
            shared = frozenset(self._shared(interval))
            found = self._of_branch[interval] = self[(interval,)], shared
        return found

    def _shared(self, interval: Interval) -> Iterator[object]:
        start, stop = interval
        for place in range(start, stop):
            for name in self._parameters[place]:
                if any(not start <= other < stop for other in self._holders[name]):
                    yield name
            for index in self._inward[place]:
                source, targets, _ = self._flows[index]
                if not start <= source < stop:
                    if any(not start <= target < stop for target in targets):
                        yield index, source
                    if source == FEED or any(not start <= t < stop for t in self._readers(source)):
                        yield source

    def _readers(self, place: int) -> Iterator[int]:
        return (target for flow in self._outward[place] for target in self._flows[flow][1])

    @cached_property
    def _holders(self) -> dict[str, list[int]]:
        """The places of every parameter."""
        found: dict[str, list[int]] = {}
        for place, names in enumerate(self._parameters):
            for name in names:
                found.setdefault(name, []).append(place)
        return found

    def __getitem__(self, intervals: Intervals) -> Content:
        found = self._found.get(intervals)
        if found is None:
            found = self._found[intervals] = self._content(intervals)
        return found

    def _content(self, intervals: Intervals) -> Content:
        places = [place for start, stop in intervals for place in range(start, stop)]
        inside = 0
        for start, stop in intervals:
            inside |= (1 << stop) - (1 << start)
        graph = self._request.graph
        names = set().union(*(self._parameters[place] for place in places))
        total = sum(graph.parameter[name].size_bytes for name in names)
        trained = sum(
            graph.parameter[n].size_bytes for n in names if graph.parameter[n].requires_grad
        )
        sent = [0.0, 0.0]
        received = [0.0, 0.0]
        inputs = [0.0, 0.0]
        num_sent = num_received = 0
        is_whole = any(self._is_whole[place] for place in places)
        entered: set[int] = set()
        senders: set[int] = set()
        for place in places:
            for index in self._inward[place]:
                source, _, size = self._flows[index]
                if index in entered or (source != FEED and inside >> source & 1):
                    continue
                entered.add(index)
                is_whole = is_whole or self._is_whole_flow[index]
                _add(received, size.per_sample, size.fixed)
                _add(inputs, size.per_sample, size.fixed)
                if source != FEED:
                    _add(sent, size.gradient_per_sample, size.gradient_fixed)
                if source not in senders:
                    senders.add(source)
                    num_received += 1
                    num_sent += source != FEED
            for index in self._outward[place]:
                _, targets, size = self._flows[index]
                count = self._num_readers(targets, inside)
                if count:
                    is_whole = is_whole or self._is_whole_flow[index]
                    _add(sent, count * size.per_sample, count * size.fixed)
                    _add(received, count * size.gradient_per_sample, count * size.gradient_fixed)
                    num_sent += count
                    num_received += count
        return Content(
            kept_bytes=total + trained * (1 + self._request.optimizer_values),
            gradient_bytes=trained,
            has_state=any(self._has_state[place] for place in places),
            is_whole=is_whole,
            sent=(sent[0], sent[1]),
            received=(received[0], received[1]),
            inputs=(inputs[0], inputs[1]),
            num_sent=num_sent,
            num_received=num_received,
        )

    def _num_readers(self, targets: tuple[int, ...], inside: int) -> int:
        """Units outside that read a value, those left out that come after another one."""
        outside = [target for target in targets if not inside >> target & 1]
        if len(outside) < 2:
            return len(outside)
        mask = sum(1 << target for target in outside)
        return sum(not self._before[target] & mask for target in outside)


def _key(size: EdgeBytes) -> tuple[float, float, float, float]:
    return size.per_sample, size.fixed, size.gradient_per_sample, size.gradient_fixed


def _add(total: list[float], per_sample: float, fixed: float) -> None:
    total[0] += per_sample
    total[1] += fixed
