"""A cluster with more of the same."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.cluster import Cluster, HostLink


def twice(cluster: Cluster) -> Cluster:
    """The cluster beside a copy of itself.

    The copies of the hosts are in the same rack where there is one, and in racks of their own
    where there are several.

    >>> from lightning_gpp.cluster import cluster_preset
    >>> two = twice(cluster_preset("summit", 8))
    >>> two.num_devices, two.link(0, 8) == two.rack_link, two.devices[8].name
    (16, True, "host0:0'")
    """
    has_racks = len({device.rack for device in cluster.devices}) > 1
    copies = tuple(
        replace(
            device,
            name=f"{device.name}'",
            host=f"{device.host}'",
            rack=f"{device.rack}'" if has_racks else device.rack,
        )
        for device in cluster.devices
    )
    links = tuple(HostLink(f"{own.host}'", own.link) for own in cluster.host_links)
    return replace(
        cluster,
        devices=(*cluster.devices, *copies),
        host_links=(*cluster.host_links, *links),
    )
