"""Devices and the links between them."""

from lightning_gpp.cluster.channels import channels
from lightning_gpp.cluster.cluster import (
    DEFAULT_LINK,
    UNSPECIFIED_KIND,
    Cluster,
    Device,
    HostLink,
    Link,
    uniform_cluster,
)
from lightning_gpp.cluster.collectives import (
    BUCKET_BYTES,
    AllReduce,
    all_reduce_channels,
    all_reduce_s,
    ring_lines,
)
from lightning_gpp.cluster.device_kind import DeviceKind
from lightning_gpp.cluster.json_form import cluster_from_json, cluster_to_json, load_cluster
from lightning_gpp.cluster.known_kinds import DEVICE_KINDS, known_kind
from lightning_gpp.cluster.layout import ClusterLayout, HostGroup
from lightning_gpp.cluster.presets import PRESETS, cluster_preset
from lightning_gpp.cluster.this_machine import host_memory_bytes, num_cores

__all__ = [
    "BUCKET_BYTES",
    "DEFAULT_LINK",
    "DEVICE_KINDS",
    "PRESETS",
    "UNSPECIFIED_KIND",
    "AllReduce",
    "Cluster",
    "ClusterLayout",
    "Device",
    "DeviceKind",
    "HostGroup",
    "HostLink",
    "Link",
    "all_reduce_channels",
    "all_reduce_s",
    "channels",
    "cluster_from_json",
    "cluster_preset",
    "cluster_to_json",
    "host_memory_bytes",
    "known_kind",
    "load_cluster",
    "num_cores",
    "ring_lines",
    "uniform_cluster",
]
