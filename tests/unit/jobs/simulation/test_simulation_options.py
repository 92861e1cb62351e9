"""The options of the job that simulates: what they say, and what is wrong with them."""

from __future__ import annotations

import importlib.resources
import re

import pytest
from omegaconf import DictConfig, OmegaConf

from lightning_gpp.cluster import Cluster, Device, HostLink, Link, uniform_cluster
from lightning_gpp.jobs.simulation.simulation_options import run_of, step_of, what_if_of, with_links
from lightning_gpp.jobs.simulation.speedup import device_counts
from lightning_gpp.simulate.program_costs import Overhead
from lightning_gpp.simulate.what_if.changes import WhatIf

DEVICES = tuple(Device(f"{i}", host=f"host{i}") for i in range(2))


def options(*overrides: str) -> DictConfig:
    """The job's own options as they are shipped, with some changed."""
    path = importlib.resources.files("lightning_gpp.configs") / "job" / "simulate.yaml"
    config = OmegaConf.create(path.read_text(encoding="utf-8"))
    assert isinstance(config, DictConfig)
    return OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides)))  # type: ignore


def test_as_they_are_shipped_they_change_nothing():
    assert what_if_of(options().what_if) == WhatIf()
    cluster = Cluster(DEVICES, Link(1.0), Link(2.0), Link(3.0), (HostLink("host0", Link(4.0)),))
    assert with_links(cluster, options().links) == cluster
    assert not run_of(options(), cluster).step.optimizer_s
    assert run_of(options(), cluster).overlap == "buckets"


def test_links_of_every_level():
    cluster = Cluster(DEVICES, Link(1.0), host_links=(HostLink("host0", Link(4.0)),))
    found = with_links(cluster, options("links.host.latency_s=0.5").links)
    assert found.host_link == Link(1.0, 0.5) and found.host_links[0].link == Link(4.0, 0.5)
    assert found.rack_link == Link(1.0)  # between hosts it was like in one; that stays
    found = with_links(cluster, options("links.rack.is_shared=true").links)
    assert (found.host_link, found.rack_link) == (Link(1.0), Link(1.0, is_shared=True))
    spine = ["links.spine.bandwidth_bytes_per_s=7", "links.spine.is_full_duplex=false"]
    assert with_links(cluster, options(*spine).links).spine_link == Link(7, is_full_duplex=False)


def test_what_a_step_takes_besides():
    overrides = ["data_s=1", "input_bytes=8", "host_bandwidth_bytes_per_s=4", "optimizer_s=2",
                 "send_s=3", "finish_s=4"]  # fmt: skip
    step = step_of(options(*(f"step.{text}" for text in overrides)).step, uniform_cluster(2))
    assert (step.data_s, step.input_bytes, step.host_link) == (1, 8, Link(4))
    assert step.optimizer_s == {0: 2, 1: 2} and step.finish_s == {0: 4, 1: 4}
    assert step.send == Overhead(3) and step.receive == Overhead()


def test_what_if():
    found = what_if_of(options("what_if.device.1=0.5", "what_if.operators.a.b=2").what_if)
    assert found == WhatIf(device={1: 0.5}, operators={"a.b": 2})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("links.host.bandwidth_bytes_per_s=-1", "links.host.bandwidth_bytes_per_s must be a numb"),
        ("links.rack.bandwidth_bytes_per_s=0", "links.rack: a link needs a bandwidth above 0"),
        ("links.host.is_shared=2", "links.host.is_shared must be true or false, got 2"),
        ("what_if.bandwidth=-2", "what_if.bandwidth is a factor above 0"),
        ("what_if.bytes=half", "what_if.bytes is a factor of at least 0"),
        ("what_if.device.x=0.5", "what_if.device.x: expected the number of a device"),
        ("overlap=none", "overlap=none is unknown; known: at_end"),
        ("all_reduce=star", "all_reduce=star is unknown; known: ring, tree"),
        ("step.data_s=-1", "step.data_s must be a number of at least 0, got -1"),
        ("step.optimizer_s=soon", "step.optimizer_s must be a number of at least 0, got 'soon'"),
        ("step.host_bandwidth_bytes_per_s=0", "step.host_bandwidth_bytes_per_s=0: a link needs"),
    ],
)
def test_a_mistake_names_its_key(override, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_all(options(override))


def read_all(config: DictConfig) -> None:
    with_links(uniform_cluster(2), config.links)
    run_of(config, uniform_cluster(2))
    what_if_of(config.what_if)


@pytest.mark.parametrize("asked", [[8], [0], ["all"]])
def test_numbers_of_devices_that_are_not_there(asked):
    with pytest.raises(ValueError, match=r"job\.speedup: .* is no number of devices"):
        device_counts(4, asked)
