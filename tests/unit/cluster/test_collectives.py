"""Sums over devices, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpp.cluster import (
    Cluster,
    Device,
    Link,
    all_reduce_s,
    uniform_cluster,
)
from lightning_gpp.cluster.collectives import tree_all_reduce_s

#   host0: gpu0 ── gpu1        1 byte/s in a host
#   host1: gpu2 ── gpu3        2 s and half a byte/s between hosts
HOSTS = Cluster(
    tuple(Device(f"gpu{i}", host=f"host{i // 2}") for i in range(4)),
    Link(1.0),
    rack_link=Link(0.5, latency_s=2.0),
)


def test_a_ring_goes_at_the_pace_of_its_slowest_link() -> None:
    # 2 (4 - 1) rounds of 8 / 4 bytes: 2 s in a host, 2 + 4 s between hosts
    assert all_reduce_s(HOSTS, [0, 1, 2, 3], 8.0) == 6 * 6.0
    assert all_reduce_s(HOSTS, [0, 1], 8.0) == 2 * 4.0


def test_a_ring_for_every_adapter_shares_the_bytes() -> None:
    cluster = replace(HOSTS, rack_link=replace(HOSTS.links[1], is_per_device=True))
    # 6 rounds, two rings of 2 messages of 8 / 4 / 2 bytes: 2 s of latency, 1 / 0.5 s of bytes
    assert all_reduce_s(cluster, [0, 1, 2, 3], 8.0) == 6 * (2.0 + 2.0)
    # of one device per host, of hosts with unequal parts, and in a host nothing changes
    for devices in ([0, 2], [0, 1, 2], [0, 1]):
        assert all_reduce_s(cluster, devices, 8.0) == all_reduce_s(HOSTS, devices, 8.0)


def test_a_tree_sends_everything_up_and_down() -> None:
    # 1>0 and 3>2 at the same time (8 s), 2>0 (2 + 16 s), and the same down
    assert tree_all_reduce_s(HOSTS, [0, 1, 2, 3], 8.0) == 2 * (8.0 + 18.0)
    # 1>0, then 2>0
    assert tree_all_reduce_s(HOSTS, [0, 1, 2], 8.0) == 2 * (8.0 + 18.0)


def test_few_bytes_are_faster_in_a_tree_and_many_in_a_ring() -> None:
    cluster = uniform_cluster(16, Link(1e9, latency_s=1e-4))
    everybody = range(16)
    few, many = (
        [how(cluster, everybody, size) for how in (all_reduce_s, tree_all_reduce_s)]
        for size in (1e3, 1e9)
    )
    assert few[0] > few[1]
    assert many[0] < many[1]
    assert many[0] == pytest.approx(2 * 15 / 16 * 1.0 + 30e-4)
    assert few[1] == pytest.approx(2 * 4 * (1e-4 + 1e-6))


def test_messages_of_a_round_take_turns_on_what_they_share() -> None:
    # three messages of a byte: beside each other, over one bus, or in and out of one port
    seconds = {"private": Link(1.0), "bus": Link(1.0, is_shared=True)}
    seconds["half"] = Link(1.0, is_full_duplex=False)
    found = {
        name: all_reduce_s(uniform_cluster(3, link), [0, 1, 2], 3.0)
        for name, link in seconds.items()
    }
    assert found == {"private": 4 * 1.0, "bus": 4 * 3.0, "half": 4 * 2.0}
