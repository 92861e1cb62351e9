"""Devices and links as data, for planners and predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_gpp.cluster.device_kind import DeviceKind, data_sheets
from lightning_gpp.common.checks import LARGEST, check_whole, is_number
from lightning_gpp.common.strict_json import JsonFormat

UNSPECIFIED_KIND = "device"
"""Kind of devices of which nothing is said: of whatever kind the costs are."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one process on a CPU.

    Attributes:
        name: name for people (``"cuda:0"``).
        kind: devices of one kind are equally fast (``"cpu"``, ``"NVIDIA H100"``).
        memory_bytes: memory for parameters and activations; None where it is not known.
        host: name of the machine that it is in.
        rack: name of the rack, or the switch, that the host is in.
    """

    name: str
    kind: str = "cpu"
    memory_bytes: int | None = None
    host: str = "host0"
    rack: str = "rack0"


@dataclass(frozen=True, slots=True)
class Link:
    """A directed network path between two devices.

    Attributes:
        bandwidth_bytes_per_s: sustained payload bandwidth, in bytes per second.
        latency_s: time before the first byte arrives, in seconds.
        is_shared: whether all messages of a host that take this kind of link share one (a bus in
            the host, a network port between hosts) instead of one per device.
        is_full_duplex: whether what goes one way leaves the other way free.
        is_per_device: between hosts, whether every device has a network adapter of its own: an
            all-reduce uses all of them (:func:`lightning_gpp.cluster.ring_lines`).

    What a message occupies on it is that of :func:`lightning_gpp.cluster.channels`.
    """

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    is_shared: bool = False
    is_full_duplex: bool = True
    is_per_device: bool = False

    def __post_init__(self) -> None:
        numbers = (self.bandwidth_bytes_per_s, self.latency_s)
        if not all(map(is_number, numbers)) or numbers[0] < 1 / LARGEST or numbers[1] < 0:
            raise ValueError(
                "a link needs a bandwidth above 0 bytes per second and a latency of at least "
                f"0 seconds, got {self}"
            )

    def transfer_s(self, size_bytes: float) -> float:
        """Seconds to move ``size_bytes`` over an otherwise idle link (alpha-beta model).

        >>> Link(bandwidth_bytes_per_s=1e9, latency_s=1e-4).transfer_s(1_000_000)
        0.0011
        """
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


DEFAULT_LINK = Link(bandwidth_bytes_per_s=2.8e9, latency_s=75e-6)
"""What gloo reached between two processes of one host (messages of 64 MB and of up to 16 KB)."""


@dataclass(frozen=True)
class Cluster:
    """Devices in hosts, hosts in racks, and the links at every level.

    Attributes:
        devices: their position is the device index of plans.
        host_link: the link between any two devices of one host.
        rack_link: between devices of different hosts of one rack; as in the host if not given.
        spine_link: between devices of different racks; as in the rack if not given.
        device_kinds: data sheets of kinds that are not among the known ones, or that differ.

    Raises:
        ValueError: there is no device, two have the same name, one has no memory, or two data
            sheets are of the same kind.
    """

    devices: tuple[Device, ...]
    host_link: Link = DEFAULT_LINK
    rack_link: Link | None = None
    spine_link: Link | None = None
    device_kinds: tuple[DeviceKind, ...] = ()

    def __post_init__(self) -> None:
        names = [device.name for device in self.devices]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a cluster needs devices with different names, got {names}")
        for device in self.devices:
            if device.memory_bytes is not None:
                check_whole(f"memory_bytes of device {device.name!r}", device.memory_bytes)
        if len({kind.name for kind in self.device_kinds}) != len(self.device_kinds):
            raise ValueError("device_kinds: there are two of one name; keep one")

    @property
    def links(self) -> tuple[Link, ...]:
        """The links at every level."""
        return tuple(filter(None, (self.host_link, self.rack_link, self.spine_link)))

    @property
    def has_private_channels(self) -> bool:
        """Whether every message has the port of its device for itself, as no link is shared."""
        return not any(link.is_shared or not link.is_full_duplex for link in self.links)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.devices)

    def link(self, source: int, target: int) -> Link:
        """The path from one device to another.

        Raises:
            ValueError: there is no such device, or both are the same.
        """
        known = range(self.num_devices)
        if source == target or source not in known or target not in known:
            raise ValueError(
                f"no link {source}->{target}: expected two different devices of "
                f"0 … {self.num_devices - 1}"
            )
        return self._link_over((self.devices[source], self.devices[target]))

    @cached_property
    def slowest_link(self) -> Link:
        """The link of the highest level that the devices span."""
        return self._link_over(self.devices)

    def _link_over(self, devices: Sequence[Device]) -> Link:
        if len({device.rack for device in devices}) > 1:
            return self.spine_link or self.rack_link or self.host_link
        if len({device.host for device in devices}) > 1:
            return self.rack_link or self.host_link
        return self.host_link

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of devices in it, in the order of their first device."""
        return tuple(dict.fromkeys(device.kind for device in self.devices))

    def first(self, num_devices: int) -> Cluster:
        """The cluster of its first devices.

        Raises:
            ValueError: it has fewer, or none are asked for.
        """
        check_whole("num_devices", num_devices)
        if num_devices > self.num_devices:
            raise ValueError(
                f"the cluster has {self.num_devices} devices, {num_devices} were asked for; lower "
                "num_devices, or add hosts to the cluster"
            )
        return replace(self, devices=self.devices[:num_devices])

    def every(self, step: int) -> Cluster:
        """The cluster of the first of every ``step`` devices."""
        return replace(self, devices=self.devices[::step])

    def knows(self, kind: str) -> bool:
        """Whether there is a data sheet of a kind of device."""
        return kind in data_sheets(self.device_kinds)

    def device_kind(self, name: str) -> DeviceKind:
        """The data sheet of a kind of device: the cluster's own, or the one that is known.

        Raises:
            ValueError: there is none.
        """
        known = data_sheets(self.device_kinds)
        if name not in known:
            raise ValueError(
                f"nothing is known of devices of kind {name!r}; known kinds: {', '.join(known)}. "
                "Name one of these (preset uniform: cluster.kind=…), or give its numbers as one "
                "of the cluster's device_kinds"
            )
        return known[name]


def uniform_cluster(num_devices: int, link: Link = DEFAULT_LINK, kind: str = "cpu") -> Cluster:
    """Equal devices of one host, of unlimited memory, joined by equal links.

    >>> [device.name for device in uniform_cluster(2).devices]
    ['cpu:0', 'cpu:1']
    """
    devices = tuple(Device(f"{kind}:{index}", kind) for index in range(num_devices))
    return Cluster(devices, link)


def channels(
    cluster: Cluster, source: int, target: int, *, is_feed: bool = False, is_sum: bool = False
) -> tuple[str, ...]:
    """The channels that a message occupies: ports of devices, and links that hosts share.

    A message of ``n`` bytes over a link takes ``latency_s + n / bandwidth`` seconds, in which it
    has its channels for itself; others that need one of them wait in the order in which they were
    ready.

    - Every message occupies the port through which its device sends (``"gpu0 out"``): a device
      sends its messages one after the other. Messages of different senders reach a device side by
      side.
    - Over a half-duplex link it also occupies the direction back: the port is one channel
      (``"gpu0"``) for what its device sends and receives.
    - Over a shared link (``Link.is_shared``) it occupies the channel of the host as well: the one
      bus in it (``"host0 bus"``), or its network port on the way out of one host and into the other
      (``"host0 out"``, ``"host1 in"``; one channel ``"host0 net"`` each where the link is half
      duplex).
    - What the feed sends leaves through a port of its own (``"gpu0 feed"``), as the runtime hands
      all of it over at the start of a step. So do sums of gradients (``"gpu0 all-reduce"``), which
      run on streams of their own beside the messages: a message does not wait for a long sum.
      That both share the bandwidth meanwhile is left out.

    Args:
        cluster: the devices and their links.
        source: the sending device.
        target: the receiving device.
        is_feed: whether the feed sends it.
        is_sum: whether it is a part of a sum of gradients.

    Raises:
        ValueError: there is no such device, or both are the same.

    >>> channels(uniform_cluster(2), 0, 1)
    ('cpu:0 out',)
    """
    link = cluster.link(source, target)
    sender, receiver = cluster.devices[source], cluster.devices[target]
    if is_feed:
        found = [f"{sender.name} feed"]
    elif link.is_full_duplex:
        found = [f"{sender.name} all-reduce" if is_sum else f"{sender.name} out"]
    else:
        found = [f"{end.name} all-reduce" if is_sum else end.name for end in (sender, receiver)]
    if link.is_shared and sender.host == receiver.host:
        found.append(f"{sender.host} bus")
    elif link.is_shared and link.is_full_duplex:
        found += [f"{sender.host} out", f"{receiver.host} in"]
    elif link.is_shared:
        found += [f"{sender.host} net", f"{receiver.host} net"]
    return tuple(found)


FORMAT = JsonFormat("lightning_gpp.cluster", version=2, older=(1,))
cluster_to_json = FORMAT.dumps
