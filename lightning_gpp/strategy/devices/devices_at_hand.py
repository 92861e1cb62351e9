"""The devices of a run, as planners see them."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_gpp.cluster import (
    DEFAULT_LINK,
    PRESETS,
    Cluster,
    Device,
    Link,
    cluster_preset,
    host_memory_bytes,
    load_cluster,
)
from lightning_gpp.common.torch_device import device_name, memory_bytes
from lightning_gpp.runtime.processes.groups import RankDevice

GPU_HOST_LINK = Link(bandwidth_bytes_per_s=20e9, latency_s=20e-6)
"""Between GPUs of one host where nobody says more: PCIe 4.0 x16, assumed; NVLink is faster."""

NETWORK_LINK = Link(bandwidth_bytes_per_s=1.1e9, latency_s=100e-6)
"""Between hosts where nobody says more: Ethernet of 10 Gbit/s, assumed."""

BESIDE_TENSORS_BYTES = 1250 * 2**20
"""What a process holds of a GPU beside tensors, half of a small one at most: on an H100 with torch
2.11 (CUDA 13) 621 MiB of context, 64 of cuBLAS and 564 of a first NCCL communicator. Those of pairs
of GPUs are known when the ranks of a plan are connected; then it may be planned again."""

ClusterLike = Cluster | str | Path
"""What :func:`resolve_cluster` takes: a cluster, the name of a preset, or a cluster file."""


@dataclass(frozen=True, slots=True)
class DeviceAtHand:
    """The device of one rank.

    Attributes:
        name: as torch calls it.
        kind: as profiles name it.
        memory_bytes: of the device; of one without its own (CPUs, Apple's GPUs) all of the
            host's; None where it is not known.
        host: name of the machine.
        identity: tells a device with its own memory from all others; ranks may share one. Empty
            of others.
    """

    name: str
    kind: str
    memory_bytes: int | None
    host: str
    identity: str = ""

    @classmethod
    def of(cls, device: torch.device) -> DeviceAtHand:
        """The device of this rank."""
        own_bytes = memory_bytes(device)
        identity = "" if own_bytes is None else RankDevice.of(device).identity
        memory = host_memory_bytes() if own_bytes is None else own_bytes
        return cls(str(device), device_name(device), memory, socket.gethostname(), identity)


def cluster_at_hand(found: Sequence[DeviceAtHand], rooms: Sequence[int | None] = ()) -> Cluster:
    """The devices of all ranks, by rank, with the memory that tensors may take.

    Ranks on one device share its memory equally.

    Hosts are numbered, so that a job finds the plan of the last one whatever hosts it gets.

    Args:
        found: the device of every rank.
        rooms: bytes that are left for tensors of each, where that was measured.

    >>> here = DeviceAtHand("cpu", "cpu", 8_000_000_000, "here")
    >>> [(d.name, d.memory_bytes) for d in cluster_at_hand([here, here]).devices]
    [('rank 0 (cpu)', 4000000000), ('rank 1 (cpu)', 4000000000)]
    """
    sharing = Counter(_memory_of(each) for each in found)
    names = dict.fromkeys(each.host for each in found)
    hosts = {name: f"host{index}" for index, name in enumerate(names)}
    devices = []
    for rank, each in enumerate(found):
        memory_bytes: int | None = each.memory_bytes
        if memory_bytes is not None:
            memory_bytes //= sharing[_memory_of(each)]
            if each.identity:
                memory_bytes = max(memory_bytes // 2, memory_bytes - BESIDE_TENSORS_BYTES)
            room = rooms[rank] if rooms else None
            memory_bytes = memory_bytes if room is None else min(memory_bytes, room)
        name = f"rank {rank} ({each.name})"
        devices.append(Device(name, each.kind, memory_bytes, hosts[each.host]))
    is_cpu = any(each.kind == "cpu" for each in found)
    return Cluster(tuple(devices), DEFAULT_LINK if is_cpu else GPU_HOST_LINK, NETWORK_LINK)


def _memory_of(device: DeviceAtHand) -> tuple[str, str]:
    """Equal for ranks that have the same memory."""
    return device.host, device.identity


def resolve_cluster(given: ClusterLike, num_devices: int) -> Cluster:
    """The cluster that a user means, with one device per rank.

    Raises:
        ValueError: there is no such preset or file, or the cluster has too few devices.
    """
    if isinstance(given, Cluster):
        if given.num_devices < num_devices:
            raise ValueError(
                f"the cluster has {given.num_devices} devices, but there are {num_devices} ranks; "
                "add devices to the cluster, or lower Trainer(devices=...)"
            )
        return given.first(num_devices)
    if str(given) in PRESETS:
        return cluster_preset(str(given), num_devices)
    check_cluster(given)
    return load_cluster(given, num_devices)


def check_cluster(given: Any) -> None:
    """Refuses at once what cannot be a cluster.

    Raises:
        ValueError: a name that is neither a preset nor a file.
        TypeError: something else.
    """
    if given is None or isinstance(given, Cluster):
        return
    if not isinstance(given, str | Path):
        raise TypeError(
            f"cluster is a {type(given).__name__}; expected a Cluster, the name of a preset "
            f"({', '.join(PRESETS)}), or a cluster file"
        )
    if str(given) not in PRESETS and not Path(given).is_file():
        raise ValueError(
            f"cluster={str(given)!r} is neither a preset ({', '.join(PRESETS)}) nor a file"
        )
