"""What a step of found stages takes at least, which is nearly what it takes.

The stages and devices of a plan, with the seconds that the judge
(:func:`lightning_gpp.planner.step_time.evaluate.evaluate_plan`) would take, as chains of work and
messages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_gpp.cluster import Link
from lightning_gpp.graph import FEED, ModelGraph, StageEdge
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.edge_bytes import edge_bytes
from lightning_gpp.planner.graphpipe.candidates.chains import Chains, ChainStage, Hop
from lightning_gpp.planner.graphpipe.candidates.found_stage import FoundStage
from lightning_gpp.planner.graphpipe.space.layout import Layout
from lightning_gpp.planner.request_tables import transfer_s
from lightning_gpp.planner.units.units import UnitGraph
from lightning_gpp.schedule.in_flight import units_by_successors
from lightning_gpp.schedule.schedules import steps_in_a_row
from lightning_gpp.schedule.ways import longest_ways

LOSS = -2
"""The place of the loss, which reads the outputs of the model."""

Devices = tuple[int, ...]
Hosts = frozenset[tuple[str, str]]
Pair = tuple[int, int]


class Carried(NamedTuple):
    """Bytes of the values on an edge (see :class:`lightning_gpp.planner.edge_bytes.EdgeBytes`).

    Attributes:
        has_backward: whether gradients flow back.
    """

    per_sample: float = 0.0
    fixed: float = 0.0
    gradient_per_sample: float = 0.0
    gradient_fixed: float = 0.0
    has_backward: bool = False

    def plus(self, other: Carried) -> Carried:
        """Both together."""
        return Carried(
            self[0] + other[0],
            self[1] + other[1],
            self[2] + other[2],
            self[3] + other[3],
            self[4] or other[4],
        )


class Estimates:
    """Estimates for the stages that are found in one problem.

    Args:
        request: the question.
        units: what is never divided.
        layout: the order of the units.
    """

    def __init__(self, request: PlanRequest, units: UnitGraph, layout: Layout) -> None:
        self._request = request
        self._num_places = len(layout.order)
        self._flows = _flows(request.graph, units, layout)
        self._links: dict[tuple[Devices, Devices], frozenset[Link | None]] = {}
        self._host_links: dict[tuple[Hosts, Hosts], frozenset[Link | None]] = {}
        self._hosts_of: dict[Devices, Hosts] = {}

    def computes_s(self, stages: Sequence[FoundStage], unit_size: float) -> float:
        """Seconds of a step that the slowest of some stages computes.

        Args:
            stages: in any order.
            unit_size: samples of the smallest micro-batch.
        """
        num_units = self._request.minibatch_size / unit_size
        return num_units * max(
            (stage.forward_s + stage.backward_s) / stage.crew.multiple for stage in stages
        )

    def edges(self, stages: Sequence[FoundStage], *, is_chain: bool) -> dict[Pair, Carried]:
        """(source, target) -> what it carries; the loss is the last stage, or behind its replicas.

        Args:
            stages: as they are numbered.
            is_chain: whether every stage waits for the one before it.
        """
        home = [0] * (self._num_places + 2)
        for number, stage in enumerate(stages):
            for place in stage.places:
                home[place] = number
        loss = len(stages) if stages[-1].crew.num_replicas > 1 else len(stages) - 1
        home[FEED], home[LOSS] = FEED, loss
        found: dict[Pair, Carried] = {}
        for place, targets, carried in self._flows:
            source = home[place]
            for target in {home[target] for target in targets}:
                if target != source:
                    pair = source, target
                    known = found.get(pair)
                    found[pair] = carried if known is None else known.plus(carried)
        for source in range(loss if is_chain else 0):
            pair = source, source + 1
            found[pair] = found.get(pair, Carried())._replace(has_backward=True)
        return found

    def least_step_s(
        self,
        stages: Sequence[FoundStage],
        devices: Sequence[Devices],
        edges: dict[Pair, Carried],
        unit_size: float,
        enough_s: float = math.inf,
    ) -> float:
        """Seconds that no step of some stages beats.

        Args:
            stages: as they are numbered.
            devices: of every stage.
            edges: see :meth:`edges`.
            unit_size: samples of the smallest micro-batch.
            enough_s: whether a step takes longer than this is of no interest.
        """
        return Chains(self._chain_stages(stages, devices, edges, unit_size)).least_step_s(enough_s)

    def _chain_stages(
        self,
        stages: Sequence[FoundStage],
        devices: Sequence[Devices],
        edges: dict[Pair, Carried],
        unit_size: float,
    ) -> list[ChainStage]:
        sizes = [stage.crew.multiple for stage in stages]
        seconds = [
            (stage.forward_s, stage.backward_s, self._sum_s(own, stage))
            for stage, own in zip(stages, devices)
        ]
        homes = list(devices)
        if len(homes[-1]) > 1:  # the loss of replicas has a stage of its own
            sizes.append(sizes[-1])
            seconds.append((0.0, 0.0, 0.0))
            homes.append(homes[-1][:1])
        traffic = self._traffic(edges, homes, sizes, unit_size)
        num_units = round(self._request.minibatch_size / unit_size)
        held = self._held(sizes, traffic.hops, num_units)
        return [
            ChainStage(
                size,
                num_units // size,
                *held[number],
                *seconds[number],
                traffic.fed_s[number],
                traffic.sent_s[number],
                traffic.sent_there_s[number],
                traffic.hops[number],
            )
            for number, size in enumerate(sizes)
        ]

    def _traffic(
        self,
        edges: dict[Pair, Carried],
        homes: Sequence[Devices],
        sizes: Sequence[int],
        unit_size: float,
    ) -> _Traffic:
        """What a replica of every stage sends, as the schedule has it, one after the other."""
        num_stages = len(sizes)
        fed_s, back_s = [0.0] * num_stages, [0.0] * num_stages
        hops: list[list[Hop]] = [[] for _ in range(num_stages)]
        there_s, feeding_s = [0.0] * num_stages, 0.0
        shares = [size / len(home) for size, home in zip(sizes, homes)]
        forwards, backwards = self._orders(edges, homes, sizes)
        gradients: dict[Pair, tuple[float, float]] = {}
        for source, target in backwards:
            carried = edges[source, target]
            if source != FEED and carried.has_backward:
                part = min(shares[source], shares[target])
                size_bytes = carried.gradient_fixed + carried.gradient_per_sample * part * unit_size
                part_s = self._part_s(homes[target], homes[source], size_bytes)
                gradients[source, target] = back_s[target] + part_s, part_s
                back_s[target] += shares[target] / part * part_s
        for source, target in forwards:
            carried = edges[source, target]
            if source == FEED:  # it has the size of the last stage, as the index -1 says
                part = min(sizes[source], shares[target])
                size_bytes = carried.fixed + carried.per_sample * part * unit_size
                part_s = self._part_s(homes[source][:1], homes[target], size_bytes)
                fed_s[target] = feeding_s + part_s
                feeding_s += part_s
                continue
            part = min(shares[source], shares[target])
            size_bytes = carried.fixed + carried.per_sample * part * unit_size
            part_s = self._part_s(homes[source], homes[target], size_bytes)
            first_back_s, part_back_s = gradients.get((source, target), (None, 0.0))
            hops[source].append(
                Hop(
                    target,
                    there_s[source] + part_s,
                    first_back_s,
                    max(1, int(shares[target] / sizes[source])),
                    max(1, int(shares[source] / sizes[target])),
                    max(1, sizes[target] // sizes[source]),
                    part_back_s,
                )
            )
            there_s[source] += shares[source] / part * part_s
        sent_s = [there + back for there, back in zip(there_s, back_s)]
        return _Traffic(fed_s, sent_s, there_s, hops)

    def _orders(
        self, edges: dict[Pair, Carried], homes: Sequence[Devices], sizes: Sequence[int]
    ) -> tuple[Sequence[Pair], Sequence[Pair]]:
        """The edges in the order in which stages send activations, and in that of gradients."""
        pairs = sorted(edges)
        if not self._request.holds_all:
            return pairs, pairs
        units = [size / len(home) for size, home in zip(sizes, homes)]
        between = [StageEdge(*pair, (), has_backward=edges[pair].has_backward) for pair in pairs]
        ways = longest_ways(units, between)
        forwards, backwards = ways.forward_sends(between), ways.backward_sends(between)
        return [(e.source, e.target) for e in forwards], [(e.source, e.target) for e in backwards]

    def _held(
        self, sizes: Sequence[int], hops: Sequence[Sequence[Hop]], num_units: int
    ) -> list[tuple[int, int]]:
        """Micro-batches of every stage in flight, and backwards that it does in a row."""
        if self._request.holds_all:
            return [(num_units // size, num_units // size) for size in sizes]
        targets = [[hop.target for hop in own] for own in hops]
        units = units_by_successors(targets, sizes)
        in_a_row = [1] * len(sizes)
        if len(set(sizes)) > 1:
            successors = [[sizes[target] for target in own] for own in targets]
            in_a_row = list(map(steps_in_a_row, sizes, successors))
        return [
            (min(num_units, held) // size, block)
            for size, held, block in zip(sizes, units, in_a_row)
        ]

    def _part_s(self, senders: Devices, receivers: Devices, size_bytes: float) -> float:
        """Seconds of a message between replicas of two stages, over the quickest link."""
        links = self._links_between(senders, receivers)
        return min([transfer_s(link, size_bytes) for link in links])

    def _links_between(self, senders: Devices, receivers: Devices) -> frozenset[Link | None]:
        """The links between two stages: where they share no device, those of their hosts."""
        key = senders, receivers
        found = self._links.get(key)
        if found is None:
            hosts = self._hosts(senders), self._hosts(receivers)
            if not set(senders).isdisjoint(receivers):
                found = self._request.tables.links(senders, receivers)
            elif (found := self._host_links.get(hosts)) is None:
                found = self._request.tables.links(senders, receivers)
                self._host_links[hosts] = found
            self._links[key] = found
        return found

    def _hosts(self, devices: Devices) -> Hosts:
        found = self._hosts_of.get(devices)
        if found is None:
            homes = (self._request.cluster.devices[device] for device in devices)
            found = self._hosts_of[devices] = frozenset((home.rack, home.host) for home in homes)
        return found

    def _sum_s(self, devices: Devices, stage: FoundStage) -> float:
        """Seconds that the sums of a stage's gradients go on at least after its last backward."""
        if len(devices) < 2 or not stage.gradient_bytes:
            return 0.0
        sums_s = self._request.tables.reduce_s(tuple(sorted(devices)), stage.gradient_bytes)
        return max(0.0, sums_s - stage.backward_s)


class _Traffic(NamedTuple):
    """Messages of all stages, as in :class:`ChainStage`."""

    fed_s: list[float]
    sent_s: list[float]
    sent_there_s: list[float]
    hops: list[list[Hop]]


def _flows(
    graph: ModelGraph, units: UnitGraph, layout: Layout
) -> list[tuple[int, tuple[int, ...], Carried]]:
    """(place that makes values, other places that read them, what they are)."""
    place_of = {
        name: layout.place[unit] for unit, names in enumerate(units.operators) for name in names
    }
    readers: dict[str, set[int]] = {name: {LOSS} for name in graph.outputs}
    for operator in graph:
        for name in operator.inputs:
            readers.setdefault(name, set()).add(place_of[operator.name])
    sums: dict[tuple[int, tuple[int, ...]], Carried] = {}
    for name, targets in readers.items():
        source = place_of[graph.producer[name]] if name in graph.producer else FEED
        if others := tuple(targets - {source}):
            size = edge_bytes(graph, (name,))
            carried = Carried(
                size.per_sample,
                size.fixed,
                size.gradient_per_sample,
                size.gradient_fixed,
                graph.values[name].is_differentiable,
            )
            sums[source, others] = sums.get((source, others), Carried()).plus(carried)
    return [(*key, carried) for key, carried in sums.items()]
