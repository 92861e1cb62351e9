"""What the stages of a plan send each other, and how long it takes.

A message takes the latency of the link and its bytes over the bandwidth (the alpha-beta model); a
device sends its messages one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_gpp.cluster import Cluster, Link
from lightning_gpp.graph import FEED, StageEdge
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.edge_bytes import edge_bytes
from lightning_gpp.planner.plan_graph import PlanGraph
from lightning_gpp.planner.timing import Messages

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Traffic:
    """All messages of a plan.

    Attributes:
        forward: edge -> its messages with activations; the feed is a source.
        backward: edge -> its messages with gradients, where they flow.
    """

    forward: Mapping[Pair, Messages]
    backward: Mapping[Pair, Messages]

    def busiest_s(self) -> dict[int, float]:
        """Stage -> seconds that a replica sends, or receives (the longer), per micro-batch."""
        sent_s: defaultdict[int, float] = defaultdict(float)
        received_s: defaultdict[int, float] = defaultdict(float)
        for (source, target), messages in self.forward.items():
            sent_s[source] += messages.sent_s
            received_s[target] += messages.received_s
        for (source, target), messages in self.backward.items():
            sent_s[target] += messages.sent_s
            received_s[source] += messages.received_s
        return {stage: max(sent_s[stage], received_s[stage]) for stage in {*sent_s, *received_s}}


def plan_traffic(request: PlanRequest, plan: PlanGraph, unit_size: float) -> Traffic:
    """The messages of a plan.

    Args:
        request: the model and the links.
        plan: its stages.
        unit_size: samples in a smallest micro-batch.
    """
    forward, backward = {}, {}
    for edge in plan.stages.edges:
        pair = edge.source, edge.target
        forward[pair], back = _edge_messages(request, plan, edge, unit_size)
        if edge.has_backward and edge.source != FEED:
            backward[pair] = back
    return Traffic(forward, backward)


def _edge_messages(
    request: PlanRequest, plan: PlanGraph, edge: StageEdge, unit_size: float
) -> tuple[Messages, Messages]:
    """The messages of an edge: with activations, and with gradients.

    A message carries what one micro-batch of the smaller side needs; where replicas split it, each
    pair of devices carries its part at the same time.
    """
    source = plan.stages.num_stages - 1 if edge.source == FEED else edge.source
    units = min(plan.multiples[source], plan.multiples[edge.target])
    per_source = plan.multiples[source] // units
    per_target = plan.multiples[edge.target] // units
    senders = 1 if edge.source == FEED else len(plan.devices[source])
    receivers = len(plan.devices[edge.target])
    sizes = edge_bytes(request.graph, edge.values, has_backward=edge.has_backward)
    link = slowest_link(request.cluster, plan.devices[source][:senders], plan.devices[edge.target])
    samples = units * unit_size
    forward_s = share_s(link, sizes.forward(samples), senders, receivers)
    backward_s = share_s(link, sizes.backward(samples), receivers, senders)
    return (
        Messages(per_source, per_target, forward_s),
        Messages(per_target, per_source, backward_s),
    )


def share_s(link: Link | None, size_bytes: float, senders: int, receivers: int) -> float:
    """Seconds until all parts of a message have left: each sender has a share of the receivers.

    Args:
        link: between both; None where they are one device.
        size_bytes: of the whole message.
        senders: replicas that send.
        receivers: replicas that receive.
    """
    if link is None:
        return 0.0
    parts = max(1, receivers // senders)
    return parts * link.latency_s + size_bytes / senders / link.bandwidth_bytes_per_s


def slowest_link(cluster: Cluster, sources: Iterable[int], targets: Iterable[int]) -> Link | None:
    """The slowest link between devices of two stages; None where both are one device."""
    some, others = _two_per_host(cluster, sources), _two_per_host(cluster, targets)
    links = {
        cluster.link(source, target) for source in some for target in others if source != target
    }
    return min(links, key=lambda link: link.bandwidth_bytes_per_s, default=None)


def _two_per_host(cluster: Cluster, devices: Iterable[int]) -> list[int]:
    """Two devices of every host, which have all links that all of them have to other devices."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index in devices:
        device = cluster.devices[index]
        if len(found[device.rack, device.host]) < 2:
            found[device.rack, device.host].append(index)
    return [index for indices in found.values() for index in indices]
