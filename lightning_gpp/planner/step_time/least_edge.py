"""What the messages between two stages take at least, for a lower bound of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
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
        there_s = min([transfer_s(link, self.sizes.forward(samples)) for link in links])
        sent_s = self._sent_s(source, target, self.sizes.forward)
        if not has_backward:
            return EdgeSeconds(there_s, None, sent_s, 0.0)
        back_s = min([transfer_s(link, self.sizes.backward(samples)) for link in links])
        return EdgeSeconds(
            there_s, back_s, sent_s, self._sent_s(target, source, self.sizes.backward)
        )

    def _sent_s(
        self, sender: EdgeEnd, receiver: EdgeEnd, size_bytes: Callable[[float], float]
    ) -> float:
        """Seconds that any replica of a stage sends in a step, at least.

        One device sends an equal part to every replica; of several each sends a part to others,
        unless these may be itself.
        """
        is_one = len(sender.devices) == 1
        part, other = (receiver, sender) if is_one else (sender, receiver)
        units = self.num_units / len(part.devices)
        count = units / part.share * max(1, part.share // other.share)
        each_bytes = size_bytes(units / count * self.unit_size)
        if not is_one:
            links = self.tables.links(sender.devices, receiver.devices)
            return count * min([transfer_s(link, each_bytes) for link in links])
        found = self.tables.links_from(sender.devices[0], receiver.devices)
        return sum([times * count * transfer_s(link, each_bytes) for link, times in found.items()])
