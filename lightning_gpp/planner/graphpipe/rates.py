"""What a stage made of given units would take, without knowing the rest of the plan.

The quantities of :mod:`lightning_gpp.planner.evaluate`, but messages take the slowest link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.graphpipe.contents import Content, Contents, Intervals
from lightning_gpp.planner.stage_costs import reduce_seconds
from lightning_gpp.planner.units import UnitGraph


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
            per_byte_s = (many_s - one_s) / (10**15 - 1)
            line = self._reduce[num_replicas] = max(0.0, one_s - per_byte_s), per_byte_s
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


class Prices:
    """What the units of a model hold, exchange and take, in one order, found once for all searches.

    Attributes:
        request: the question.
        order: unit at every place.
        contents: what stages hold and exchange.
    """

    def __init__(self, request: PlanRequest, units: UnitGraph, order: tuple[int, ...]) -> None:
        self.request = request
        self.order = order
        self.contents = Contents(request, units, order)
        self._times = UnitTimes(request, units, order)
        self._rates: dict[float, Rates] = {}

    def rates(self, microbatch_size: float) -> Rates:
        """The rates of stages with one smallest micro-batch."""
        found = self._rates.get(microbatch_size)
        if found is None:
            found = Rates(self.request, self.contents, self._times, microbatch_size)
            self._rates[microbatch_size] = found
        return found
