"""A pair of replicas with shares 2/3 and 1/3: its costs, its simulated and its emulated step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.cost import Costs
from lightning_gpp.planner import Plan, PlanRequest, Stage, evaluate_plan
from lightning_gpp.simulate import Simulation, TaskKind, simulate_plan

#   x ──▶ a ──▶ b ──▶ c     a and b on two devices, one of them twice as fast; c on a third
CHAIN = literal_graph({"a": "x", "b": "a", "c": "b"})
DEVICES = (Device("fast", "fast"), Device("slow", "slow"), Device("last", "fast"))


def question(schedule: str) -> PlanRequest:
    fast = profile_of(CHAIN, 2e-3)
    slow = replace(profile_of(CHAIN, 4e-3), device="slow")
    return PlanRequest(
        CHAIN,
        cluster=Cluster(DEVICES, Link(1e6)),
        costs=Costs((replace(fast, device="fast"), slow)),
        minibatch_size=24,
        schedule=schedule,
    )


def plan(shares: tuple[int, ...]) -> Plan:
    pair = Stage(0, ("a", "b"), (0, 1), sum(shares), shares=shares)
    return Plan((pair, Stage(1, ("c",), (2,), sum(shares))), num_microbatches=24)


def busy_s(found: Simulation, device: int) -> float:
    kinds = (TaskKind.FORWARD, TaskKind.BACKWARD)
    return sum(t.end_s - t.start_s for t in found.tasks if t.device == device and t.kind in kinds)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_unequal_devices_are_busy_equally_long(schedule: str) -> None:
    request = question(schedule)
    unequal, equal = plan((4, 2)), plan((3, 3))
    found = simulate_plan(unequal, request)
    assert busy_s(found, 0) == pytest.approx(busy_s(found, 1))
    halves = simulate_plan(equal, request)
    assert busy_s(halves, 1) == pytest.approx(2 * busy_s(halves, 0))
    assert found.step_s < halves.step_s
    for each, step_s in ((unequal, found.step_s), (equal, halves.step_s)):
        assert evaluate_plan(each, request).step_s == pytest.approx(step_s, rel=0.02)


@pytest.mark.parametrize("shares", [(4,), (5, 0), (4, 1), (2, 2, 2)])
def test_shares_that_do_not_fit(shares: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"one share of at least 1 for each of its 2 devices, .* 6"
    ):
        Stage(0, ("a",), (0, 1), 6, shares=shares)
