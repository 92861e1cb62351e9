"""What a stage made of given units would take, without knowing the rest of the plan.

The quantities of :mod:`lightning_gpp.planner.evaluate`, with two things assumed that only a whole
plan tells: messages take the slowest link, and the units that read a value outside the stage are
in different stages unless one of them follows the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from lightning_gpp.graph import FEED, ModelGraph
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.edge_bytes import EdgeBytes, edge_bytes
from lightning_gpp.planner.graphpipe.layout import Interval
from lightning_gpp.planner.stage_costs import reduce_seconds
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


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast a stage is, and how much it may hold, on some devices.

    Attributes:
        seconds_per_sample: without recomputation.
        most_in_flight: micro-batches in flight that fit into memory.
        recomputed_seconds_per_sample: with recomputation; infinite where it is not allowed.
        recomputed_most_in_flight: micro-batches in flight that then fit.
        message_s: seconds that a replica sends or receives, the longer, per micro-batch.
        reduce_s: seconds to sum the gradients of the replicas.
    """

    seconds_per_sample: float
    most_in_flight: float
    recomputed_seconds_per_sample: float
    recomputed_most_in_flight: float
    message_s: float = 0.0
    reduce_s: float = 0.0


class UnitTimes:
    """Running sums over the places of what units take, by micro-batch size and kind of device."""

    def __init__(self, request: PlanRequest, units: UnitGraph, order: Sequence[int]) -> None:
        self._request = request
        self._operators = [units.operators[unit] for unit in order]
        self._sums: dict[tuple[float, str], tuple[list[float], list[float], list[float]]] = {}

    def sums(self, size: float, kind: str) -> tuple[list[float], list[float], list[float]]:
        """Running sums of seconds, of forward seconds, and of activation bytes."""
        found = self._sums.get((size, kind))
        if found is None:
            costs = self._request.profile(size, kind).operators
            rows = [[costs[name] for name in names] for names in self._operators]
            found = self._sums[size, kind] = (
                [
                    *accumulate(
                        (sum(c.forward_s + c.backward_s for c in r) for r in rows), initial=0.0
                    )
                ],
                [*accumulate((sum(c.forward_s for c in r) for r in rows), initial=0.0)],
                [
                    *accumulate(
                        (float(sum(c.activation_bytes for c in r)) for r in rows), initial=0.0
                    )
                ],
            )
        return found


class Crew(NamedTuple):
    """The devices of a stage, and how it uses them.

    Attributes:
        num_replicas: how many devices, all of one kind.
        kind: their kind, as an index into the kinds of the cluster.
        multiple: its micro-batch, all replicas together, in units of the smallest one.
    """

    num_replicas: int
    kind: int
    multiple: int


class Rates:
    """The rates of stages with one smallest micro-batch."""

    def __init__(
        self, request: PlanRequest, contents: Contents, times: UnitTimes, microbatch_size: float
    ) -> None:
        self._request = request
        self._contents = contents
        self._times = times
        self.microbatch_size = microbatch_size
        self._link = request.cluster.slowest_link
        self._limits = []
        for kind in request.cluster.kinds:
            limits = [d.memory_bytes for d in request.cluster.devices if d.kind == kind]
            known = [limit for limit in limits if limit is not None]
            self._limits.append(min(known) if known else math.inf)
        self._reduce: dict[int, tuple[float, float]] = {}
        self._found: dict[Crew, dict[Intervals, Rate]] = {}
        self._least: dict[Crew, list[float]] = {}

    def reduce_line(self, num_replicas: int) -> tuple[float, float]:
        """Seconds to sum gradients over neighbouring devices: at least, and per byte."""
        line = self._reduce.get(num_replicas)
        if line is None:
            devices = tuple(range(min(num_replicas, self._request.num_devices)))
            one_s, many_s = (reduce_seconds(self._request.cluster, devices, n) for n in (1, 10**15))
            line = self._reduce[num_replicas] = one_s, (many_s - one_s) / 10**15
        return line

    def least_seconds(self, crew: Crew) -> list[float]:
        """Running sums of seconds per sample that units take at least: compute and reduction."""
        found = self._least.get(crew)
        if found is None:
            per_byte_s = self.reduce_line(crew.num_replicas)[1] / self._request.minibatch_size
            size = self.microbatch_size * crew.multiple
            pairs = zip(self.seconds(crew), self._contents.gradient_bytes)
            found = self._least[crew] = [s / size + n * per_byte_s for s, n in pairs]
        return found

    def seconds(self, crew: Crew) -> list[float]:
        """Running sums of the seconds of a replica's share of a micro-batch."""
        kind = self._request.cluster.kinds[crew.kind]
        return self._times.sums(self._share(crew), kind)[0]

    def _share(self, crew: Crew) -> float:
        return self.microbatch_size * crew.multiple / crew.num_replicas

    def of(self, crew: Crew) -> dict[Intervals, Rate]:
        """The rates found so far for some devices."""
        return self._found.setdefault(crew, {})

    def __call__(self, intervals: Intervals, crew: Crew) -> Rate:
        """The rate of a stage, found once."""
        known = self.of(crew)
        found = known.get(intervals)
        if found is None:
            found = known[intervals] = self._rate(intervals, crew)
        return found

    def _rate(self, intervals: Intervals, crew: Crew) -> Rate:
        content = self._contents[intervals]
        num_replicas = crew.num_replicas
        if (content.has_state or content.is_whole) and num_replicas > 1:
            return Rate(math.inf, 0, math.inf, 0)
        size = self.microbatch_size * crew.multiple
        share = self._share(crew)
        both, forward, kept = self._times.sums(share, self._request.cluster.kinds[crew.kind])
        compute_s = forward_s = activation_bytes = 0.0
        for start, stop in intervals:
            compute_s += both[stop] - both[start]
            forward_s += forward[stop] - forward[start]
            activation_bytes += kept[stop] - kept[start]
        at_least_s, per_byte_s = self.reduce_line(num_replicas)
        reduce_s = (
            at_least_s + per_byte_s * content.gradient_bytes if content.gradient_bytes else 0.0
        )
        reduce_per_sample_s = reduce_s / self._request.minibatch_size
        message_s = self._message_s(content, share)
        free = self._limits[crew.kind] - content.kept_bytes
        again = self._request.may_recompute and not content.has_state
        input_bytes = content.inputs[0] * share + content.inputs[1]
        return Rate(
            max(compute_s, message_s) / size + reduce_per_sample_s,
            _count(free, activation_bytes),
            max(compute_s + forward_s, message_s) / size + reduce_per_sample_s
            if again
            else math.inf,
            _count(free - activation_bytes, input_bytes) if again else 0,
            message_s,
            reduce_s,
        )

    def _message_s(self, content: Content, share: float) -> float:
        link = self._link
        sent = content.sent[0] * share + content.sent[1]
        received = content.received[0] * share + content.received[1]
        return max(
            content.num_sent * link.latency_s + sent / link.bandwidth_bytes_per_s,
            content.num_received * link.latency_s + received / link.bandwidth_bytes_per_s,
        )


def _count(free: float, each: float) -> float:
    if free < 0:
        return 0
    return math.inf if each <= 0 or math.isinf(free) else math.floor(free / each + 1e-9)
