"""Devices and the links between them."""

from lightning_gpp.cluster.cluster import (
    DEFAULT_LINK,
    Cluster,
    Device,
    Link,
    uniform_cluster,
)
from lightning_gpp.cluster.json_form import cluster_from_json, cluster_to_json

__all__ = [
    "DEFAULT_LINK",
    "Cluster",
    "Device",
    "Link",
    "cluster_from_json",
    "cluster_to_json",
    "uniform_cluster",
]
