"""Clusters as people describe them: groups of equal hosts, and the links at every level.

A :class:`ClusterLayout` is a few lines where a :class:`~lightning_gpp.cluster.Cluster` lists every
device; presets and cluster files are layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_gpp.cluster.cluster import DEFAULT_LINK, FORMAT, Cluster, Device, Link
from lightning_gpp.cluster.device_kind import DeviceKind, data_sheets
from lightning_gpp.common.checks import check_whole
from lightning_gpp.common.data_file import read_document
from lightning_gpp.common.strict_json import JsonFormat, JsonFormError

MOST_DEVICES = 100_000
"""A cluster lists all its devices; so many are far more than any plan here has been made for."""


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Hosts of one type.

    Attributes:
        kind: kind of their devices.
        devices_per_host: devices in each.
        num_hosts: how many hosts; None for as many as are asked for.
        hosts_per_rack: hosts that share a rack; None puts all such hosts into the first rack.
        memory_bytes: memory of a device; that of its kind's data sheet if not given.

    Raises:
        ValueError: a number is below 1.
    """

    kind: str
    devices_per_host: int
    num_hosts: int | None = None
    hosts_per_rack: int | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("devices_per_host", "num_hosts", "hosts_per_rack", "memory_bytes"):
            value = getattr(self, name)
            if value is not None:
                check_whole(name, value)


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """Groups of hosts, and the links inside and between them.

    Attributes:
        hosts: the groups; devices count through them in this order.
        host_link: between the devices of one host.
        rack_link: between hosts of one rack; as in the host if not given.
        spine_link: between racks; as in the rack if not given.
        device_kinds: data sheets of kinds that are not among the known ones, or that differ.

    Raises:
        ValueError: there is no group, or one without ``num_hosts`` is not the last.
    """

    hosts: tuple[HostGroup, ...]
    host_link: Link = DEFAULT_LINK
    rack_link: Link | None = None
    spine_link: Link | None = None
    device_kinds: tuple[DeviceKind, ...] = ()

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ValueError("hosts: expected at least one group of hosts")
        if any(group.num_hosts is None for group in self.hosts[:-1]):
            raise ValueError("hosts: only the last group may leave num_hosts open")

    def cluster(self, num_devices: int | None = None) -> Cluster:
        """The first devices of the layout.

        Args:
            num_devices: how many; all, or one host of an open last group, if not given.

        Raises:
            ValueError: there are fewer, or fewer than 1 are asked for.
        """
        if num_devices is not None:
            check_whole("num_devices", num_devices)
        all_devices = sum(group.devices_per_host * (group.num_hosts or 1) for group in self.hosts)
        count = num_devices or all_devices
        if count > MOST_DEVICES:
            raise ValueError(f"clusters have at most {MOST_DEVICES} devices here, got {count}")
        return Cluster(
            devices=tuple(itertools.islice(self._devices(), count)),
            host_link=self.host_link,
            rack_link=self.rack_link,
            spine_link=self.spine_link,
            device_kinds=self.device_kinds,
        ).first(count)

    def _devices(self) -> Iterator[Device]:
        """Devices in order, without end where the last group is open."""
        host = first_rack = 0
        sheets = data_sheets(self.device_kinds)
        for group in self.hosts:
            in_group = rack = 0
            sheet = sheets.get(group.kind)
            memory_bytes = group.memory_bytes or getattr(sheet, "memory_bytes", None)
            while group.num_hosts is None or in_group < group.num_hosts:
                if group.hosts_per_rack is not None:
                    rack = first_rack + in_group // group.hosts_per_rack
                for index in range(group.devices_per_host):
                    yield Device(
                        name=f"host{host}:{index}",
                        kind=group.kind,
                        memory_bytes=memory_bytes,
                        host=f"host{host}",
                        rack=f"rack{rack}",
                    )
                in_group += 1
                host += 1
            if group.hosts_per_rack is not None:
                first_rack = rack + 1


LAYOUT_FORMAT = JsonFormat("lightning_gpp.cluster_layout", version=1)


def load_cluster(path: str | Path, num_devices: int | None = None) -> Cluster:
    """Reads a cluster file, in JSON (``.json``) or YAML.

    It is a cluster (``"format": "lightning_gpp.cluster"``, every device listed) or, shorter to
    write, a layout (``"format": "lightning_gpp.cluster_layout"``, groups of equal hosts).

    Args:
        path: the file.
        num_devices: takes the first devices only; all that the file has if not given.

    Raises:
        ValueError: the file is not of that form; the text names it, the key, and what was
            expected. Or it has fewer devices than asked for.
        FileNotFoundError: there is no such file.
    """
    found: Cluster | ClusterLayout
    found = read_document(path, {FORMAT: Cluster, LAYOUT_FORMAT: ClusterLayout})
    try:
        if isinstance(found, ClusterLayout):
            return found.cluster(num_devices)
        return found if num_devices is None else found.first(num_devices)
    except ValueError as error:
        raise JsonFormError(f"{path}: {error}") from error
