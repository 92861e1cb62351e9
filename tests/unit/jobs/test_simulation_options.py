"""The options of the job that simulates: what they say, and what is wrong with them."""

from __future__ import annotations

import importlib.resources
import re

import pytest
from omegaconf import DictConfig, OmegaConf

from lightning_gpp.cluster import Cluster, Device, HostLink, Link, uniform_cluster
from lightning_gpp.jobs.simulate import check_choices, device_counts, step_of, with_links
from lightning_gpp.simulate.program_costs import Overhead, StepCosts
from lightning_gpp.simulate.what_if import CHANGES

DEVICES = tuple(Device(f"{i}", host=f"host{i}") for i in range(2))


def options(*overrides: str) -> DictConfig:
    """The job's own options as they are shipped, with some changed."""
    path = importlib.resources.files("lightning_gpp.configs") / "job" / "simulate.yaml"
    config = OmegaConf.create(path.read_text(encoding="utf-8"))
    assert isinstance(config, DictConfig)
    return OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides)))  # type: ignore


def test_as_they_are_shipped_they_change_nothing():
    assert options().what_if == dict.fromkeys(CHANGES, 1.0)
    cluster = Cluster(DEVICES, Link(1.0), Link(2.0), Link(3.0), (HostLink("host0", Link(4.0)),))
    assert with_links(cluster, options().links) == cluster
    assert step_of(options().step, cluster) == StepCosts()
    assert options().overlap == "buckets"


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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("links.host.bandwidth_bytes_per_s=-1", "links.host.bandwidth_bytes_per_s must be a numb"),
        ("links.rack.bandwidth_bytes_per_s=0", "links.rack: a link needs a bandwidth above 0"),
        ("links.host.is_shared=2", "links.host.is_shared must be true or false, got 2"),
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
    check_choices(config)
    step_of(config.step, uniform_cluster(2))


@pytest.mark.parametrize("asked", [[8], [0], ["all"]])
def test_numbers_of_devices_that_are_not_there(asked):
    with pytest.raises(ValueError, match=r"job\.speedup: .* is no number of devices"):
        device_counts(4, asked)
