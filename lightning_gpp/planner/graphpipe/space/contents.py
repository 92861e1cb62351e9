"""What stages made of given units hold and exchange, whatever the size of their micro-batches.

The units that read a value outside the stage are taken to be in different stages unless one of them
follows the other, which only a whole plan tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from lightning_gpp.graph import FEED
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.graphpipe.space.crew import Interval
from lightning_gpp.planner.graphpipe.space.flows import unit_flows
from lightning_gpp.planner.graphpipe.space.holdings import Holdings
from lightning_gpp.planner.units.units import UnitGraph


class Content(NamedTuple):
    """What a set of units holds and exchanges, whatever the size of its micro-batches.

    Attributes:
        kept_bytes: parameters, gradients and optimizer state.
        parameter_bytes: the parameters among them.
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
    """A value between places, which are bits.

    Attributes:
        source: the place that makes it; none if it is the feed.
        targets: the places that read it.
        is_whole: whether it cannot be cut by samples.
        per_sample: bytes (these four: see :class:`EdgeBytes`).
        fixed: bytes.
        gradient_per_sample: bytes.
        gradient_fixed: bytes.
    """

    source: int
    targets: int
    is_whole: bool
    per_sample: float
    fixed: float
    gradient_per_sample: float
    gradient_fixed: float


class Contents:
    """The contents of stages by their places, each found once.

    Attributes:
        gradient_bytes: running sums over the places (see :class:`Holdings`).
    """

    def __init__(self, request: PlanRequest, units: UnitGraph, order: Sequence[int]) -> None:
        graph = request.graph
        self._graph = graph
        self._optimizer_values = request.optimizer_values
        self._holdings = Holdings(graph, units, order)
        self.gradient_bytes = self._holdings.gradient_bytes
        operators = [[graph.operator[name] for name in units.operators[unit]] for unit in order]
        with_state = (any(operator.state for operator in some) for some in operators)
        self._num_with_state = [0, *accumulate(with_state)]
        whole = {name for name in graph.outputs if not graph.values[name].is_cuttable}
        with_whole = (
            any(value.name in whole for operator in some for value in operator.outputs)
            for some in operators
        )
        self._num_whole = [0, *accumulate(with_whole)]
        # Flows from before each place to it or behind it.
        self._crossing: list[list[_Flow]] = [[] for _ in range(len(order) + 1)]
        place = {unit: position for position, unit in enumerate(order)}
        self._note_flows(units, place)
        self._before = [0] * len(order)
        for position, unit in enumerate(order):
            for source in units.predecessors[unit]:
                self._before[position] |= self._before[place[source]] | 1 << place[source]
        self._found: dict[Interval, Content] = {}

    def _note_flows(self, units: UnitGraph, place: Mapping[int, int]) -> None:
        for flow in unit_flows(self._graph, units):
            targets = sorted(place[target] for target in flow.targets)
            new = _Flow(
                0 if flow.source == FEED else 1 << place[flow.source],
                sum(1 << target for target in targets),
                not flow.is_cuttable,
                flow.size.per_sample,
                flow.size.fixed,
                flow.size.gradient_per_sample,
                flow.size.gradient_fixed,
            )
            first = 0 if flow.source == FEED else place[flow.source] + 1
            for position in range(first, targets[-1] + 1):
                self._crossing[position].append(new)

    def __getitem__(self, interval: Interval) -> Content:
        found = self._found.get(interval)
        if found is None:
            found = self._found[interval] = self._content(interval)
        return found

    def _content(self, interval: Interval) -> Content:
        start, stop = interval
        inside = (1 << stop) - (1 << start)
        total, trained = self._holdings.bytes_of(interval)
        sent = sent_fixed = received = received_fixed = inputs = inputs_fixed = 0.0
        num_sent = num_received = 0
        senders: set[int] = set()
        is_whole = self._num_whole[stop] > self._num_whole[start]
        for flow in self._crossing[start]:
            if not flow.targets & inside:
                continue
            source = flow.source
            is_whole = is_whole or flow.is_whole
            received += flow.per_sample
            received_fixed += flow.fixed
            inputs += flow.per_sample
            inputs_fixed += flow.fixed
            if source:
                sent += flow.gradient_per_sample
                sent_fixed += flow.gradient_fixed
            if source not in senders:
                senders.add(source)
                num_received += 1
                num_sent += source > 0
        for flow in self._crossing[stop]:
            if not flow.source & inside:
                continue
            count = self._num_readers(flow.targets >> stop << stop)
            is_whole = is_whole or flow.is_whole
            sent += count * flow.per_sample
            sent_fixed += count * flow.fixed
            received += count * flow.gradient_per_sample
            received_fixed += count * flow.gradient_fixed
            num_sent += count
            num_received += count
        return Content(
            kept_bytes=total + trained * (1 + self._optimizer_values),
            parameter_bytes=total,
            gradient_bytes=trained,
            has_state=self._num_with_state[stop] > self._num_with_state[start],
            is_whole=is_whole,
            sent=(sent, sent_fixed),
            received=(received, received_fixed),
            inputs=(inputs, inputs_fixed),
            num_sent=num_sent,
            num_received=num_received,
        )

    def _num_readers(self, readers: int) -> int:
        """Units that read a value, those left out that come after another one."""
        count, left = 0, readers
        while left:
            first = left & -left
            count += not self._before[first.bit_length() - 1] & readers
            left ^= first
        return count
