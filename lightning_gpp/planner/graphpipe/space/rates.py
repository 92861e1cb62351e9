"""What a stage made of given units would take, without knowing the rest of the plan.

The quantities of :mod:`lightning_gpp.planner.step_time.evaluate`, but messages take the slowest
link.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from lightning_gpp.cost import OpProfile
from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.planner.base import IN_A_ROW, PlanRequest
from lightning_gpp.planner.graphpipe.space.contents import Content, Contents
from lightning_gpp.planner.graphpipe.space.crew import Crew, Interval
from lightning_gpp.planner.graphpipe.space.load import Load
from lightning_gpp.planner.step_time.stage_costs import reduce_line
from lightning_gpp.planner.step_time.users_step import users_step_bytes
from lightning_gpp.planner.units.units import UnitGraph


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
    """The rates of stages on some devices, with one smallest micro-batch.

    Attributes:
        least_seconds: running sums over the places of the seconds per sample that units take at
            least: compute and reduction.
        seconds: running sums of the seconds of a replica's share of a micro-batch.
    """

    def __init__(self, prices: Prices, crew: Crew, microbatch_size: float) -> None:
        request = prices.request
        kind = request.cluster.kinds[crew.kind]
        self._contents = prices.contents
        self._has_replicas = crew.num_replicas > 1
        self._minibatch_size = request.minibatch_size
        self._may_recompute = request.may_recompute
        self._held_versions = request.held_versions
        self._size = microbatch_size * crew.multiple
        self._share = microbatch_size * crew.multiple / crew.num_replicas
        self.seconds, self._forward, self._kept = prices.sums(self._share, kind)
        self._memory_bytes = prices.memory_bytes[crew.kind]
        self._num_places = len(prices.order)
        self._step_bytes = users_step_bytes(request, microbatch_size, in_flight=1)
        self._reduce = prices.reduce_line(crew.num_replicas)
        link = request.cluster.slowest_link
        self._latency_s, self._per_second = link.latency_s, link.bandwidth_bytes_per_s
        self._found: dict[Interval, Rate] = {}
        per_byte_s = self._reduce[1] / request.minibatch_size
        pairs = zip(self.seconds, prices.contents.gradient_bytes)
        self.least_seconds = [s / self._size + n * per_byte_s for s, n in pairs]

    @cached_property
    def least_each(self) -> list[float]:
        """Seconds per sample that the unit at every place takes at least."""
        return list(map(sub, self.least_seconds[1:], self.least_seconds))

    @cached_property
    def each(self) -> list[float]:
        """Seconds of a replica's share of a micro-batch at every place."""
        return list(map(sub, self.seconds[1:], self.seconds))

    def __call__(self, interval: Interval) -> Rate:
        """The rate of a stage, found once."""
        found = self._found.get(interval)
        if found is None:
            found = self._found[interval] = self._rate(interval, self._contents[interval])
        return found

    @cached_property
    def kept_each(self) -> list[float]:
        """Bytes that a replica's share of a micro-batch keeps at every place for its backward."""
        return list(map(sub, self._kept[1:], self._kept))

    def _rate(self, interval: Interval, content: Content) -> Rate:
        if self._has_replicas and (content.has_state or content.is_whole):
            return IMPOSSIBLE
        start, stop = interval
        compute_s = self.seconds[stop] - self.seconds[start]
        activation_bytes = self._kept[stop] - self._kept[start]
        message_s = self._message_s(content)
        reduce_s = 0.0
        if content.gradient_bytes:
            reduce_s = self._reduce[0] + self._reduce[1] * content.gradient_bytes
        per_sample_s = reduce_s / self._minibatch_size
        free = self._memory_bytes - content.kept_bytes
        if stop == self._num_places:  # the loss is where the last stage is
            free -= self._step_bytes
        again_s, again_most = math.inf, 0.0
        if self._may_recompute and not content.has_state:
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

    def _most_in_flight(self, free: float, each: float, copy: float) -> float:
        """Micro-batches in flight that fit, with the copies of the parameters that they need.

        Args:
            free: bytes that are left beside one copy.
            each: bytes that a micro-batch in flight keeps.
            copy: bytes of the parameters.
        """
        held = self._held_versions

        def is_too_many(in_flight: int) -> bool:
            return _count(free - (held.of(in_flight) - 1) * copy, each) < in_flight

        most = _count(free - (held.least - 1) * copy, each)
        if held.least == held.most:
            return most
        possible = range(1, 1 + int(min(most, IN_A_ROW)))
        return bisect_left(possible, True, key=is_too_many)

    def _message_s(self, content: Content) -> float:
        sent = content.sent[0] * self._share + content.sent[1]
        received = content.received[0] * self._share + content.received[1]
        return max(
            content.num_sent * self._latency_s + sent / self._per_second,
            content.num_received * self._latency_s + received / self._per_second,
        )


def _count(free: float, each: float) -> float:
    if free < 0:
        return 0
    return math.inf if each <= 0 or math.isinf(free) else math.floor(free / each * (1 + ROUNDING))


class Rates:
    """The rates of stages with one smallest micro-batch.

    Attributes:
        microbatch_size: the smallest micro-batch, in samples.
        contents: what stages hold and exchange.
    """

    def __init__(self, prices: Prices, microbatch_size: float) -> None:
        self._prices = prices
        self.contents = prices.contents
        self.microbatch_size = microbatch_size
        self._of: dict[Crew, CrewRates] = {}
        self._loads: dict[tuple[Crew, ...], Load] = {}

    def of(self, crew: Crew) -> CrewRates:
        """The rates of stages on some devices."""
        found = self._of.get(crew)
        if found is None:
            found = self._of[crew] = CrewRates(self._prices, crew, self.microbatch_size)
        return found

    def load(self, crews: tuple[Crew, ...], num_devices: int) -> Load:
        """What all units take, where stages have one of some crews of all devices."""
        found = self._loads.get(crews)
        if found is None:
            found = self._loads[crews] = Load(
                lambda crew: self.of(crew).least_each,
                lambda crew: self.of(crew).kept_each,
                crews,
                num_devices,
            )
        return found


class Prices:
    """What the units of a model hold, exchange and take, in one order, found once for all searches.

    Args:
        request: the question.
        units: what is never divided.
        order: unit at every place.
        hides_sums: whether sums of gradients are taken to cost nothing.

    Attributes:
        request: the question.
        order: unit at every place.
        contents: what stages hold and exchange.
        memory_bytes: memory of a device of each kind, the smallest; infinite where it is not known.
    """

    def __init__(
        self,
        request: PlanRequest,
        units: UnitGraph,
        order: tuple[int, ...],
        *,
        hides_sums: bool = False,
    ) -> None:
        self.request = request
        self.order = order
        self.contents = Contents(request, units, order)
        self._operators = [units.operators[unit] for unit in order]
        self._hides_sums = hides_sums
        self.memory_bytes = tuple(
            min(
                math.inf if device.memory_bytes is None else device.memory_bytes
                for device in request.cluster.devices
                if device.kind == kind
            )
            for kind in request.cluster.kinds
        )
        self._rates: dict[float, Rates] = {}
        self._lines: dict[int, tuple[float, float]] = {}
        self._sums: dict[tuple[float, str], tuple[list[float], list[float], list[float]]] = {}

    def sums(self, size: float, kind: str) -> tuple[list[float], list[float], list[float]]:
        """Running sums over the places: seconds, forward seconds, and bytes of activations."""
        if (size, kind) not in self._sums:
            costs = self.request.profile(size, kind).operators
            rows = [[costs[name] for name in names] for names in self._operators]

            def running(value: Callable[[OpProfile], float]) -> list[float]:
                return [*accumulate((sum(map(value, row)) for row in rows), initial=0.0)]

            self._sums[size, kind] = (
                running(lambda cost: cost.forward_s + cost.backward_s),
                running(lambda cost: cost.forward_s),
                running(lambda cost: cost.activation_bytes),
            )
        return self._sums[size, kind]

    def reduce_line(self, num_replicas: int) -> tuple[float, float]:
        """Seconds in which neighbours sum gradients: at least, and per byte."""
        if self._hides_sums:
            return 0.0, 0.0
        if num_replicas not in self._lines:
            devices = tuple(range(min(num_replicas, self.request.num_devices)))
            self._lines[num_replicas] = reduce_line(self.request.cluster, devices)
        return self._lines[num_replicas]

    def rates(self, microbatch_size: float) -> Rates:
        """The rates of stages with one smallest micro-batch."""
        found = self._rates.get(microbatch_size)
        if found is None:
            found = self._rates[microbatch_size] = Rates(self, microbatch_size)
        return found
