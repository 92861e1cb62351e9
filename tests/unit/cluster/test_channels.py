"""Which channels messages occupy."""

from __future__ import annotations

import pytest

from lightning_gpp.cluster import Cluster, Device, Link, channels

HALF = Link(1.0, is_full_duplex=False)
BUS = Link(1.0, is_shared=True)
HALF_BUS = Link(1.0, is_shared=True, is_full_duplex=False)


def cluster(host_link: Link, rack_link: Link) -> Cluster:
    """Devices a and b in host X, c in host Y."""
    devices = (Device("a", host="X"), Device("b", host="X"), Device("c", host="Y"))
    return Cluster(devices, host_link, rack_link)


@pytest.mark.parametrize(
    ("host_link", "in_host", "rack_link", "between"),
    [
        (Link(1.0), {"a out"}, Link(1.0), {"a out"}),
        (HALF, {"a", "b"}, HALF, {"a", "c"}),
        (BUS, {"a out", "X bus"}, BUS, {"a out", "X out", "Y in"}),
        (HALF_BUS, {"a", "b", "X bus"}, HALF_BUS, {"a", "c", "X net", "Y net"}),
    ],
)
def test_channels(host_link: Link, in_host: set[str], rack_link: Link, between: set[str]) -> None:
    pool = cluster(host_link, rack_link)
    assert set(channels(pool, 0, 1)) == in_host
    assert set(channels(pool, 0, 2)) == between


def test_the_feed_has_a_port_of_its_own() -> None:
    assert channels(cluster(HALF, BUS), 0, 1, is_feed=True) == ("a feed",)
    assert set(channels(cluster(HALF, BUS), 0, 2, is_feed=True)) == {"a feed", "X out", "Y in"}


def test_an_unknown_device() -> None:
    with pytest.raises(ValueError, match="no link 0->7: expected two different devices of 0 … 2"):
        channels(cluster(HALF, BUS), 0, 7)
