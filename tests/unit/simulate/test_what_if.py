"""A plan in a changed world: links, devices, input, and which change buys most."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Cluster, Device, Link, uniform_cluster
from lightning_gpp.cost import Costs
from lightning_gpp.planner import Plan, PlanRequest, Stage
from lightning_gpp.simulate.program_costs import StepCosts
from lightning_gpp.simulate.what_if import Case

CHAIN = literal_graph({"a": "x", "b": "a", "c": "b"})
PLAN = Plan((Stage(0, ("a",), (0,)), Stage(1, ("b", "c"), (1,))), num_microbatches=4)


def case(plan: Plan = PLAN, cluster: Cluster | None = None, **run: Any) -> Case:
    cluster = cluster or uniform_cluster(2, Link(1e6, 1e-4))
    costs = Costs((profile_of(CHAIN, {"a": 1e-3, "b": 1e-3, "c": 1e-3}),))
    return Case(plan, PlanRequest(CHAIN, cluster, costs, 8), **run)


def test_nothing_changes_nothing():
    assert case().changed({"compute": 1.0, "latency": 1}) == case()


def test_links():
    devices = tuple(Device(f"{i}") for i in range(2))
    cluster = Cluster(devices, Link(1e9, 1e-5, is_shared=True), Link(1e8))
    found = case(cluster=cluster).changed({"bandwidth": 2, "latency": 0.5}).request.cluster
    assert found.host_link == Link(2e9, 0.5e-5, is_shared=True)
    assert found.rack_link == Link(2e8) and found.spine_link is None


def test_devices_that_are_faster_compute_and_update_faster():
    step = StepCosts(feed_s=1e-3, turn_s=2e-3, data_s=2.0, optimizer_s={0: 3e-3, 1: 1e-3})
    free = case(cluster=uniform_cluster(2, Link(1e30)), step=replace(step, data_s=0.0))
    assert free.changed({"compute": 4}).step_s == pytest.approx(free.step_s / 4)
    assert case(step=step).changed({"compute": 4}).step.data_s == 2.0


@pytest.mark.parametrize(
    "factors",
    [{"bandwidth": -1.0}, {"bandwidth": 0.0}, {"compute": float("inf")}, {"latency": -0.5},
     {"latency": float("nan")}, {"latency": "half"}],
)  # fmt: skip
def test_a_factor_that_makes_no_sense(factors):
    (name,) = factors
    with pytest.raises(ValueError, match=rf"what_if\.{name} is a factor .* got"):
        case().changed(factors)
