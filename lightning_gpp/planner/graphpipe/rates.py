"""What stages of given units hold, exchange and take, without knowing the rest of the plan.

The quantities of :mod:`lightning_gpp.planner.step_time.evaluate`, but messages take the slowest
link, and the units that read a value outside the stage are taken to be in different stages unless
one of them follows the other, which only a whole plan tells.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from lightning_gpp.common.cached_method import cached_method
from lightning_gpp.cost import OpProfile
from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.graph import FEED
from lightning_gpp.planner.base import IN_A_ROW
from lightning_gpp.planner.graphpipe.draft import UnitTables, places
from lightning_gpp.planner.request_tables import EdgeBytes, edge_bytes
from lightning_gpp.planner.step_time.stage_costs import users_step_bytes

Interval = tuple[int, int]
"""Places of the units in a line, from the first up to (not including) the second."""


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


class Content(NamedTuple):
    """What a set of units holds and exchanges, whatever the size of its micro-batches.

    Attributes:
        kept_bytes: parameters, gradients and optimizer state.
        parameter_bytes: the parameters among them.
        gradient_bytes: gradients.
        has_state: whether it must neither be replicated nor run its forward twice.
        is_whole: whether it exchanges values that cannot be cut by samples, as replicas would need.
        sent: bytes per sample, and of any size, that it sends: activations and gradients.
        received: what it receives.
        inputs: the activations that it receives.
        num_sent: messages that it sends for a micro-batch.
        num_received: messages that it receives.
    """

    kept_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    has_state: bool
    is_whole: bool
    sent: tuple[float, float]
    received: tuple[float, float]
    inputs: tuple[float, float]
    num_sent: int
    num_received: int


class _Flow(NamedTuple):
    """A value between places, which are bits; the source is 0 if it is the feed."""

    source: int
    targets: int
    size: EdgeBytes
    is_whole: bool


class Contents:
    """The contents of stages by their places, each found once.

    Attributes:
        request: the question.
        operators: names of those at every place.
        gradient_bytes: running sums over the places of the bytes of gradients, of parameters that
            no earlier place has.
    """

    def __init__(self, tables: UnitTables) -> None:
        self.request, self._tables = tables.request, tables
        graph = self._graph = tables.request.graph
        self.operators = [tables.units.operators[unit] for unit in tables.order]
        whole = [name for name in graph.outputs if not graph.values[name].is_cuttable]
        self._whole = tables.units_of(graph.producer[n] for n in whole if n in graph.producer)
        parameters = [
            frozenset(name for operator in names for name in graph.operator[operator].parameters)
            for names in self.operators
        ]
        holders = Counter(name for names in parameters for name in names)
        self._shared = [frozenset(n for n in names if holders[n] > 1) for names in parameters]
        own = [self._bytes(names - more) for names, more in zip(parameters, self._shared)]
        self._own_bytes = [*accumulate((size for size, _ in own), initial=0)]
        self._own_trained_bytes = [*accumulate((trained for _, trained in own), initial=0)]
        self.gradient_bytes, known = [0], set[str]()
        for names in parameters:
            self.gradient_bytes.append(self.gradient_bytes[-1] + self._bytes(names - known)[1])
            known |= names
        # Flows from before each place to it or behind it.
        self._crossing: list[list[_Flow]] = [[] for _ in range(tables.num_units + 1)]
        fed = {item.value.name for item in graph.inputs if not item.requires_grad}
        for at, values in tables.made.items():
            source = 0 if at == FEED else 1 << at
            for name, readers, _ in values:
                if targets := readers & ~source:
                    size = edge_bytes(graph, (name,), has_backward=name not in fed)
                    flow = _Flow(source, targets, size, not graph.values[name].is_cuttable)
                    for position in range(source.bit_length(), targets.bit_length()):
                        self._crossing[position].append(flow)
        self._before: list[int] = []
        for needs in tables.needs:
            self._before.append(needs)
            for place in places(needs):
                self._before[-1] |= self._before[place]

    def _bytes(self, names: Iterable[str]) -> tuple[int, int]:
        """Bytes of parameters, and of those that are trained."""
        parameters = [self._graph.parameter[name] for name in names]
        trained = (p.size_bytes for p in parameters if p.requires_grad)
        return sum(p.size_bytes for p in parameters), sum(trained)

    @cached_method
    def of(self, interval: Interval) -> Content:
        """What a stage holds and exchanges."""
        start, stop = interval
        inside = (1 << stop) - (1 << start)
        sent = sent_fixed = received = received_fixed = 0.0
        senders: set[int] = set()
        is_whole = bool(self._whole & inside)
        for flow in self._crossing[start]:
            if flow.targets & inside:
                size = flow.size
                is_whole = is_whole or flow.is_whole
                received += size.per_sample
                received_fixed += size.fixed
                if flow.source:
                    sent += size.gradient_per_sample
                    sent_fixed += size.gradient_fixed
                senders.add(flow.source)
        inputs = received, received_fixed
        num_read = 0
        for flow in self._crossing[stop]:
            if flow.source & inside:
                count, size = self._num_readers(flow.targets >> stop << stop), flow.size
                is_whole = is_whole or flow.is_whole
                sent += count * size.per_sample
                sent_fixed += count * size.fixed
                received += count * size.gradient_per_sample
                received_fixed += count * size.gradient_fixed
                num_read += count
        total = self._own_bytes[stop] - self._own_bytes[start]
        trained = self._own_trained_bytes[stop] - self._own_trained_bytes[start]
        if shared := set().union(*self._shared[start:stop]):
            more, more_trained = self._bytes(shared)
            total, trained = total + more, trained + more_trained
        return Content(
            kept_bytes=total + trained * (1 + self.request.optimizer_values),
            parameter_bytes=total,
            gradient_bytes=trained,
            has_state=self._tables.has_state(inside),
            is_whole=is_whole,
            sent=(sent, sent_fixed),
            received=(received, received_fixed),
            inputs=inputs,
            num_sent=num_read + len(senders - {0}),
            num_received=num_read + len(senders),
        )

    def _num_readers(self, readers: int) -> int:
        """Units that read a value, those left out that come after another one."""
        count, left = 0, readers
        while left:
            first = left & -left
            count += not self._before[first.bit_length() - 1] & readers
            left ^= first
        return count


class Rate(NamedTuple):
    """How fast a stage is, and how much it may hold, on some devices.

    Attributes:
        seconds_per_sample: without recomputation.
        most_in_flight: micro-batches in flight that fit into memory.
        recomputed_seconds_per_sample: with recomputation; infinite where it is not allowed.
        recomputed_most_in_flight: micro-batches in flight that then fit.
    """

    seconds_per_sample: float
    most_in_flight: float
    recomputed_seconds_per_sample: float
    recomputed_most_in_flight: float


IMPOSSIBLE = Rate(math.inf, 0, math.inf, 0)
"""The rate of a stage that must not have replicas."""


class CrewRates:
    """The rates of stages on some devices, with one smallest micro-batch, each found once.

    Args:
        contents: what stages hold and exchange.
        crew: the devices.
        microbatch_size: the smallest micro-batch, in samples.
        memory_bytes: of each device.
        reduce_line: seconds in which they sum gradients: at least, and per byte.

    Attributes:
        least_seconds: running sums over the places of the seconds per sample that units take at
            least: compute and reduction.
        least_each: the same of the unit at every place.
        each: seconds of a replica's share of a micro-batch at every place.
    """

    def __init__(
        self,
        contents: Contents,
        crew: Crew,
        microbatch_size: float,
        memory_bytes: float,
        reduce_line: tuple[float, float],
    ) -> None:
        request = self._request = contents.request
        self._contents = contents
        self._has_replicas = crew.num_replicas > 1
        self._size = microbatch_size * crew.multiple
        self._share = microbatch_size * crew.multiple / crew.num_replicas
        costs = request.profile(self._share, request.cluster.kinds[crew.kind]).operators
        self._seconds = _sums(contents, costs, lambda cost: cost.forward_s + cost.backward_s)
        self._forward = _sums(contents, costs, lambda cost: cost.forward_s)
        self._kept = _sums(contents, costs, lambda cost: cost.activation_bytes)
        self._memory_bytes, self._reduce = memory_bytes, reduce_line
        self._step_bytes = users_step_bytes(request, microbatch_size, in_flight=1)
        self._link = request.cluster.slowest_link
        per_byte_s = reduce_line[1] / request.minibatch_size
        pairs = zip(self._seconds, contents.gradient_bytes)
        self.least_seconds = [s / self._size + n * per_byte_s for s, n in pairs]
        self.least_each = list(map(sub, self.least_seconds[1:], self.least_seconds))
        self.each = list(map(sub, self._seconds[1:], self._seconds))

    @cached_method
    def of(self, interval: Interval) -> Rate:
        """The rate of a stage."""
        (start, stop), content = interval, self._contents.of(interval)
        if self._has_replicas and (content.has_state or content.is_whole):
            return IMPOSSIBLE
        compute_s = self._seconds[stop] - self._seconds[start]
        activation_bytes = self._kept[stop] - self._kept[start]
        message_s = max(
            self._message_s(content.num_sent, content.sent),
            self._message_s(content.num_received, content.received),
        )
        reduce_s = 0.0
        if content.gradient_bytes:
            reduce_s = self._reduce[0] + self._reduce[1] * content.gradient_bytes
        per_sample_s = reduce_s / self._request.minibatch_size
        free = self._memory_bytes - content.kept_bytes
        if stop == len(self._contents.operators):  # the loss is where the last stage is
            free -= self._step_bytes
        again_s, again_most = math.inf, 0.0
        if self._request.may_recompute and not content.has_state:
            forward_s = self._forward[stop] - self._forward[start]
            again_s = max(compute_s + forward_s, message_s) / self._size + per_sample_s
            input_bytes = content.inputs[0] * self._share + content.inputs[1]
            again_most = _count(free - activation_bytes, input_bytes)
        return Rate(
            max(compute_s, message_s) / self._size + per_sample_s,
            self._most_in_flight(free, activation_bytes, content.parameter_bytes),
            again_s,
            again_most,
        )

    def _message_s(self, num_messages: int, size: tuple[float, float]) -> float:
        size_bytes = size[0] * self._share + size[1]
        link = self._link
        return num_messages * link.latency_s + size_bytes / link.bandwidth_bytes_per_s

    def _most_in_flight(self, free: float, each: float, copy: float) -> float:
        """Micro-batches in flight that fit, with the copies of the parameters that they need.

        Args:
            free: bytes that are left beside one copy.
            each: bytes that a micro-batch in flight keeps.
            copy: bytes of the parameters.
        """
        held = self._request.held_versions

        def is_too_many(in_flight: int) -> bool:
            return _count(free - (held.of(in_flight) - 1) * copy, each) < in_flight

        most = _count(free - (held.least - 1) * copy, each)
        if held.least == held.most:
            return most
        possible = range(1, 1 + int(min(most, IN_A_ROW)))
        return bisect_left(possible, True, key=is_too_many)


def _sums(
    contents: Contents, costs: Mapping[str, OpProfile], value: Callable[[OpProfile], float]
) -> list[float]:
    """Running sums over the places."""
    each = (sum([value(costs[name]) for name in names]) for names in contents.operators)
    return [*accumulate(each, initial=0.0)]


def _count(free: float, each: float) -> float:
    if free < 0:
        return 0
    return math.inf if each <= 0 or math.isinf(free) else math.floor(free / each * (1 + ROUNDING))
