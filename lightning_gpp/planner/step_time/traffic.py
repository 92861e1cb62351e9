"""What the stages of a plan send each other, and how long it takes.

A message takes the latency of the link and its bytes over the bandwidth (the alpha-beta model); a
device sends its messages one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lightning_gpp.cluster import Link
from lightning_gpp.graph import FEED, StageEdge
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan_graph import PlanGraph
from lightning_gpp.schedule import find_schedule

Pair = tuple[int, int]


class Messages(NamedTuple):
    """The messages of an edge in one direction.

    Attributes:
        per_source: messages that one micro-batch of the sender makes.
        per_target: messages that one micro-batch of the receiver needs.
        message_s: seconds of one of them.
    """

    per_source: int
    per_target: int
    message_s: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """All messages of a plan.

    Both are in the order in which stages send, and no edge is before those that lead to its source.

    Attributes:
        forward: edge -> its messages with activations; the feed is a source.
        backward: edge -> its messages with gradients, where they flow.
    """

    forward: Mapping[Pair, Messages]
    backward: Mapping[Pair, Messages]

    def sent_s(self) -> dict[int, float]:
        """Stage -> seconds that a replica sends per micro-batch; none that send nothing."""
        found: defaultdict[int, float] = defaultdict(float)
        for (source, _), messages in self.forward.items():
            found[source] += messages.per_source * messages.message_s
        for (_, target), messages in self.backward.items():
            found[target] += messages.per_source * messages.message_s
        return found


def plan_traffic(request: PlanRequest, plan: PlanGraph, unit_size: float) -> Traffic:
    """The messages of a plan.

    Args:
        request: the model and the links.
        plan: its stages.
        unit_size: samples in a smallest micro-batch.
    """
    edges = plan.stages.edges
    forwards, backwards = edges, edges
    if find_schedule(request.schedule).forwards_first:
        forwards, backwards = (
            plan.path_lengths.forward_sends(edges),
            plan.path_lengths.backward_sends(edges),
        )
    messages = {_pair(edge): _edge_messages(request, plan, edge, unit_size) for edge in forwards}
    backward = {pair: messages[pair][1] for pair in map(_pair, backwards)}
    return Traffic(
        {pair: forward for pair, (forward, _) in messages.items()},
        {pair: found for pair, found in backward.items() if found is not None},
    )


def _pair(edge: StageEdge) -> Pair:
    return edge.source, edge.target


def _edge_messages(
    request: PlanRequest, plan: PlanGraph, edge: StageEdge, unit_size: float
) -> tuple[Messages, Messages | None]:
    """The messages of an edge: with activations, and with gradients where they flow.

    A message carries what one micro-batch of the smaller side needs; where replicas split it, each
    pair of devices carries its part at the same time.
    """
    is_feed = edge.source == FEED
    source = plan.stages.num_stages - 1 if is_feed else edge.source
    paces = plan.multiples[source], plan.multiples[edge.target]
    units = min(paces)
    per_source, per_target = paces[0] // units, paces[1] // units
    senders = plan.devices[source][:1] if is_feed else plan.devices[source]
    receivers = plan.devices[edge.target]
    sizes = request.tables.edge_bytes(edge.values, has_backward=edge.has_backward)
    link = request.tables.slowest_link(senders, receivers)
    counts = len(senders), len(receivers)
    samples = units * unit_size
    forward_s = share_s(link, sizes.forward(samples), *counts)
    forward = Messages(per_source, per_target, forward_s)
    if is_feed or not edge.has_backward:
        return forward, None
    backward_s = share_s(link, sizes.backward(samples), *counts[::-1])
    return forward, Messages(per_target, per_source, backward_s)


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
