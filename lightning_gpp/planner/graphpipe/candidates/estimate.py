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
from lightning_gpp.planner.step_time.stage_costs import reduce_line
from lightning_gpp.planner.step_time.traffic import share_s
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


class LinkSeconds(NamedTuple):
    """Seconds of a message between two groups of replicas: of an empty one, and per byte."""

    there_s: float
    there_per_byte_s: float
    back_s: float
    back_per_byte_s: float


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
        self._links: dict[tuple[Devices, Devices], LinkSeconds] = {}
        self._host_links: dict[tuple[Hosts, Hosts], Link | None] = {}
        self._hosts_of: dict[Devices, Hosts] = {}
        self._sums: dict[Devices, tuple[float, float]] = {}

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
            (stage.forward_s, stage.backward_s, self._sum_s(own, stage.gradient_bytes))
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
                traffic.received_s[number],
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
        """What stages exchange; messages of a stage follow each other as the schedule has it."""
        num_stages = len(sizes)
        found = _Traffic(
            [0.0] * num_stages,
            [0.0] * num_stages,
            [0.0] * num_stages,
            [[] for _ in range(num_stages)],
        )
        fed_s, sent_s, received_s, hops = found
        forwards_s, feeding_s = [0.0] * num_stages, 0.0
        forwards, backwards = self._orders(edges, homes, sizes)
        gradients = self._gradients(edges, backwards, homes, sizes, unit_size)
        for source, target in forwards:
            carried = edges[source, target]
            source_size, target_size = sizes[source], sizes[target]
            size = min(source_size, target_size)
            samples = size * unit_size
            source_parts, target_parts = source_size // size, target_size // size
            sender = homes[source] if source != FEED else homes[FEED][:1]
            link = self._link(sender, homes[target])
            part_s = link[0] + (carried[1] + carried[0] * samples) * link[1]
            received_s[target] += target_parts * part_s
            if source == FEED:  # it has the size of the last stage, as the index -1 says
                fed_s[target] = feeding_s + part_s
                feeding_s += source_parts * part_s
                continue
            there_s = forwards_s[source] + part_s
            forwards_s[source] += source_parts * part_s
            sent_s[source] += source_parts * part_s
            back_s, part_back_s = gradients.get((source, target), (None, 0.0))
            sent_s[target] += target_parts * part_back_s
            received_s[source] += source_parts * part_back_s
            hops[source].append(
                Hop(target, there_s, back_s, source_parts, target_parts, part_s, part_back_s)
            )
        return found

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

    def _gradients(
        self,
        edges: dict[Pair, Carried],
        order: Sequence[Pair],
        homes: Sequence[Devices],
        sizes: Sequence[int],
        unit_size: float,
    ) -> dict[Pair, tuple[float, float]]:
        """Edge -> seconds from a backward until the first part is back, and those of a part."""
        found: dict[Pair, tuple[float, float]] = {}
        backwards_s = [0.0] * len(sizes)
        for source, target in order:
            carried = edges[source, target]
            if source == FEED or not carried.has_backward:
                continue
            size = min(sizes[source], sizes[target])
            link = self._link(homes[source], homes[target])
            samples = size * unit_size
            size_bytes = carried.gradient_fixed + carried.gradient_per_sample * samples
            part_s = link.back_s + size_bytes * link.back_per_byte_s
            found[source, target] = backwards_s[target] + part_s, part_s
            backwards_s[target] += sizes[target] // size * part_s
        return found

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

    def _link(self, senders: Devices, receivers: Devices) -> LinkSeconds:
        key = senders, receivers
        found = self._links.get(key)
        if found is None:
            link = self._slowest_link(senders, receivers)
            found = self._links[key] = _link_seconds(link, len(senders), len(receivers))
        return found

    def _slowest_link(self, senders: Devices, receivers: Devices) -> Link | None:
        """The slowest link between two stages: where they share no device, that of their hosts."""
        if set(senders).intersection(receivers):
            return self._request.tables.slowest_link(senders, receivers)
        key = self._hosts(senders), self._hosts(receivers)
        if key not in self._host_links:
            self._host_links[key] = self._request.tables.slowest_link(senders, receivers)
        return self._host_links[key]

    def _hosts(self, devices: Devices) -> Hosts:
        found = self._hosts_of.get(devices)
        if found is None:
            homes = (self._request.cluster.devices[device] for device in devices)
            found = self._hosts_of[devices] = frozenset((home.rack, home.host) for home in homes)
        return found

    def _sum_s(self, devices: Devices, num_bytes: int) -> float:
        """Seconds to sum gradients over the replicas of a stage."""
        if len(devices) < 2 or not num_bytes:
            return 0.0
        line = self._sums.get(devices)
        if line is None:
            line = self._sums[devices] = reduce_line(self._request.cluster, devices)
        return line[0] + line[1] * num_bytes


class _Traffic(NamedTuple):
    """Messages of all stages, as in :class:`ChainStage`."""

    fed_s: list[float]
    sent_s: list[float]
    received_s: list[float]
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


def _link_seconds(link: Link | None, num_senders: int, num_receivers: int) -> LinkSeconds:
    if link is None:
        return LinkSeconds(0.0, 0.0, 0.0, 0.0)
    per_byte_s = 1.0 / link.bandwidth_bytes_per_s
    return LinkSeconds(
        share_s(link, 0.0, num_senders, num_receivers),
        per_byte_s / num_senders,
        share_s(link, 0.0, num_receivers, num_senders),
        per_byte_s / num_receivers,
    )
