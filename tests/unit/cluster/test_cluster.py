from __future__ import annotations

import pytest

from lightning_gpp.cluster import Cluster, Device, Link, uniform_cluster


def test_transfer_is_latency_plus_size_over_bandwidth():
    assert Link(1e6, latency_s=0.5).transfer_s(2_000_000) == 2.5
    assert Link(1e6).transfer_s(0) == 0.0


@pytest.mark.parametrize(("bandwidth", "latency_s"), [(0.0, 0.0), (1.0, -1.0)])
def test_impossible_links_are_refused(bandwidth, latency_s):
    with pytest.raises(ValueError, match="a link needs a bandwidth above 0"):
        Link(bandwidth, latency_s)


def test_every_pair_has_the_same_link():
    cluster = uniform_cluster(3, Link(5.0))
    assert cluster.link(0, 2) == cluster.link(2, 1) == Link(5.0)


@pytest.mark.parametrize(("source", "target"), [(0, 0), (0, 3), (-1, 1)])
def test_links_need_two_devices(source, target):
    with pytest.raises(ValueError, match=rf"no link {source}->{target}: expected two different"):
        uniform_cluster(3).link(source, target)


def test_device_names_are_unique():
    with pytest.raises(ValueError, match="devices with different names"):
        Cluster((Device("a"), Device("a")))
