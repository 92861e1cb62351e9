"""The work of devices in a step as plain numbers, fast to play.

An *item* is a forward, a backward, or anything else that takes a device its time, or that it waits
with. A device does its items in their order. Its messages leave at the end of the item that sends
them; a message keeps its channels to itself while it is on its way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

Send = tuple[int, int]
"""A message: the item that waits for it, and the number of its :data:`How`."""

How = tuple[float, int, tuple[int, ...]]
"""How a message goes: its seconds, the port that it leaves through, and the channels that it shares
with messages of other devices. Without channels the port is its own: it leaves when those before it
have left."""


class Sum(NamedTuple):
    """The all-reduce of gradients over some devices, bucket by bucket.

    Attributes:
        devices: devices that take part.
        last: of each device the item after which its gradients are final.
        buckets: the part of those items after which a bucket is final, and the seconds of its sum.
        port: where they follow one another if the devices take part in no other sums.
        channels: what they share with messages and other sums; without channels the port is theirs.
        waiting: the items that wait for the end of the last one.
        place: of two that are ready at once the one with the smaller number comes first.
    """

    devices: tuple[int, ...]
    last: tuple[int, ...]
    buckets: tuple[tuple[float, float], ...]
    port: int
    channels: tuple[int, ...]
    waiting: tuple[int, ...] = ()
    place: int = 0


@dataclass(slots=True)
class Work:
    """All work of a step.

    Attributes:
        seconds: duration of each item.
        missing: number of messages and all-reduces that each item waits for.
        sends: what each sends, in this order.
        hows: how messages go.
        lines: items of every device, in order.
        sums: in the order in which devices begin them: a device begins none before the gradients
            of all those before it are final.
        num_ports: ports of messages and sums that share no channels; messages of one port are of
            one device.
        num_channels: channels that messages and sums share.
    """

    seconds: list[float] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    sends: list[tuple[Send, ...]] = field(default_factory=list)
    hows: list[How] = field(default_factory=list)
    lines: list[list[int]] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    num_ports: int = 0
    num_channels: int = 0
