"""What the messages between two stages take at least, for a lower bound of a step."""

from __future__ import annotations

import math
from typing import NamedTuple

from lightning_gpp.planner.edge_bytes import EdgeBytes
from lightning_gpp.planner.request_tables import Devices, RequestTables, transfer_s


class EdgeEnd(NamedTuple):
    """A stage at one end of an edge.

    Attributes:
        devices: of its replicas, which all take as much.
        units: smallest micro-batches that all of them together take at a time.
    """

    devices: Devices
    units: int

    @property
    def share(self) -> int:
        """Smallest micro-batches in one of a replica."""
        return self.units // len(self.devices)


class EdgeSeconds(NamedTuple):
    """Seconds of messages, all of them at least; those of a :class:`TimedEdge`."""

    there_s: float
    back_s: float | None
    sent_s: float
    sent_back_s: float


class LeastEdge(NamedTuple):
    """An edge whose messages are to be timed.

    Attributes:
        tables: of the request.
        sizes: bytes of what crosses.
        num_units: smallest micro-batches of a mini-batch.
        unit_size: samples of each.
    """

    tables: RequestTables
    sizes: EdgeBytes
    num_units: int
    unit_size: float

    def seconds(self, source: EdgeEnd, target: EdgeEnd, *, has_backward: bool) -> EdgeSeconds:
        """What the messages take between two stages.

        Args:
            source: sends activations; one device if it is the feed.
            target: receives them.
            has_backward: whether gradients come back.
        """
        links = self.tables.links(source.devices, target.devices)
        samples = math.gcd(source.share, target.share) * self.unit_size
        there_bytes = self.sizes.forward(samples)
        there_s = min([transfer_s(link, there_bytes) for link in links])
        sent_s = self._sent_s(source, target, there_s, there_bytes)
        if not has_backward:
            return EdgeSeconds(there_s, None, sent_s, 0.0)
        back_bytes = self.sizes.backward(samples)
        back_s = min([transfer_s(link, back_bytes) for link in links])
        sent_back_s = self._sent_s(target, source, back_s, back_bytes)
        return EdgeSeconds(there_s, back_s, sent_s, sent_back_s)

    def _sent_s(
        self, sender: EdgeEnd, receiver: EdgeEnd, least_s: float, size_bytes: float
    ) -> float:
        """Seconds that any replica of a stage sends in a step through its busiest port, at least.

        One device sends as much to every replica; of several each has its part of the messages.

        Args:
            sender: whose messages they are.
            receiver: who gets them.
            least_s: seconds of a message, at least.
            size_bytes: bytes of a message, at least.
        """
        num_senders, num_receivers = len(sender.devices), len(receiver.devices)
        if num_senders > 1 or num_receivers == 1:
            each = self.num_units / num_senders / sender.share
            count = each * max(1, sender.share // receiver.share)
            return count * least_s / self.tables.num_ports
        each = self.num_units / num_receivers / receiver.share
        count = each * max(1, receiver.share // sender.share)
        links = self.tables.links_from(sender.devices[0], receiver.devices)
        all_s = count * sum([n * transfer_s(link, size_bytes) for link, n in links.items()])
        return all_s / self.tables.num_ports
