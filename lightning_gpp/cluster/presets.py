"""Clusters by name.

Link bandwidths are data-sheet numbers per direction times what messages of some megabytes sustain:
0.85 of NVLink and 0.88 of InfiniBand (UCX moved 11 of 12.5 GB/s over one rail of Summit,
rapidsai/ucx-py issue 616). Latencies (10 us inside of a host, 20 us between hosts) are assumed: a
send and a receive kernel, and the wire. A link is what one pair of devices gets while the other
devices of its hosts are quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_gpp.cluster.cluster import DEFAULT_LINK, UNSPECIFIED_KIND, Cluster, Link
from lightning_gpp.cluster.device_kind import A100_80GB, H100_80GB, V100_16GB
from lightning_gpp.cluster.layout import ClusterLayout, HostGroup, load_cluster
from lightning_gpp.cluster.this_machine import cpu_cluster
from lightning_gpp.common.checks import check_whole

NVLINK_EFFICIENCY = 0.85
INFINIBAND_EFFICIENCY = 0.88
HOST_LATENCY_S = 10e-6
NETWORK_LATENCY_S = 20e-6


def _nvlink(bytes_per_s: float) -> Link:
    return Link(bytes_per_s * NVLINK_EFFICIENCY, HOST_LATENCY_S)


def _infiniband(bits_per_s: float) -> Link:
    return Link(bits_per_s / 8 * INFINIBAND_EFFICIENCY, NETWORK_LATENCY_S)


SUMMIT = ClusterLayout(
    hosts=(HostGroup(V100_16GB, devices_per_host=4, hosts_per_rack=18),),
    host_link=_nvlink(2 * 25e9),
    rack_link=_infiniband(2 * 100e9),
)
"""Summit as GraphPipe used it (arXiv 2406.17145, section 7): four of a node's six V100, 16 GB each.

Two NVLink2 bricks of 25 GB/s join two GPUs of a socket (between the sockets they share an X-Bus of
32 GB/s per direction, which is not modelled); two rails of EDR, 100 Gbit/s each, join the nodes in
a non-blocking fat tree; 18 nodes are in a rack (OLCF, Summit User Guide).
"""

DGX_A100 = ClusterLayout(
    hosts=(HostGroup(A100_80GB, devices_per_host=8, hosts_per_rack=4),),
    host_link=_nvlink(300e9),
    rack_link=replace(_infiniband(200e9), is_per_device=True),
)
"""DGX A100: eight A100 80 GB behind NVSwitch, NVLink3 at 300 GB/s per direction and GPU; one HDR
adapter of 200 Gbit/s per GPU, rails in a full fat tree (NVIDIA, DGX A100 User Guide; DGX SuperPOD
reference architecture)."""

DGX_H100 = ClusterLayout(
    hosts=(HostGroup(H100_80GB, devices_per_host=8, hosts_per_rack=4),),
    host_link=_nvlink(450e9),
    rack_link=replace(_infiniband(400e9), is_per_device=True),
)
"""DGX H100: eight H100 80 GB behind NVSwitch, NVLink4 at 450 GB/s per direction and GPU; one
ConnectX-7 adapter of 400 Gbit/s per GPU, rails in a full fat tree (NVIDIA, DGX H100 User Guide)."""


def cluster_preset(name: str, num_devices: int | None = None, **options: Any) -> Cluster:
    """A cluster preset, or the cluster of a file.

    Args:
        name: one of :data:`PRESETS`.
        num_devices: number of devices; by default those of one host, or all of a file.
        options: of ``cpu``: none; of ``uniform``: ``kind``, ``memory_bytes``,
            ``bandwidth_bytes_per_s``, ``latency_s``; of ``from_file``: ``path``.

    Raises:
        ValueError: an unknown name or option, or there are not so many devices.

    >>> cluster = cluster_preset("summit", num_devices=32)
    >>> cluster.kinds, cluster.devices[31].name, cluster.link(3, 4) == cluster.rack_link
    (('Tesla V100-SXM2-16GB',), 'host7:3', True)
    """
    if name not in PRESETS:
        raise ValueError(f"unknown cluster {name!r}; known clusters: {', '.join(PRESETS)}")
    try:
        return PRESETS[name](num_devices, **options)
    except TypeError as error:
        if "argument" in str(error):
            raise ValueError(f"cluster {name!r}: {error}") from error
        raise


def _uniform(
    num_devices: int | None = None,
    *,
    kind: str = UNSPECIFIED_KIND,
    memory_bytes: float | None = None,
    bandwidth_bytes_per_s: float = DEFAULT_LINK.bandwidth_bytes_per_s,
    latency_s: float = DEFAULT_LINK.latency_s,
) -> Cluster:
    """Equal devices of one host joined by equal links; memory may be written as 16e9."""
    if num_devices is not None:
        check_whole("num_devices", num_devices)
    group = HostGroup(kind, devices_per_host=num_devices or 1, memory_bytes=_whole(memory_bytes))
    return ClusterLayout((group,), Link(bandwidth_bytes_per_s, latency_s)).cluster(num_devices)


def _whole(number: float | None) -> Any:
    """A whole number as an ``int``; what is none is left for a check to refuse."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _from_file(num_devices: int | None = None, *, path: str) -> Cluster:
    """A cluster file."""
    if not isinstance(path, (str, Path)):
        raise ValueError(f"path of the cluster file: expected a text, got {path!r}")
    return load_cluster(path, num_devices)


PRESETS: Mapping[str, Callable[..., Cluster]] = MappingProxyType(
    {
        "summit": SUMMIT.cluster,
        "dgx_a100": DGX_A100.cluster,
        "dgx_h100": DGX_H100.cluster,
        "cpu": cpu_cluster,
        "uniform": _uniform,
        "from_file": _from_file,
    }
)
"""Name -> function of the number of devices and the options."""
