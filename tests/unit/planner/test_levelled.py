"""Shares by speed: against brute force, and plans with them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from helpers.graphs import literal_graph, profile_of
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.cost import Costs
from lightning_gpp.cost.work import Line
from lightning_gpp.planner import PLANNERS, Plan, PlanRequest, Stage, evaluate_plan, validate_plan
from lightning_gpp.planner.levelled import levelled, whole_level
from lightning_gpp.simulate import simulate_plan

#   x ──▶ a ──▶ b ──▶ c ──▶ d
CHAIN = literal_graph({"a": "x", "b": "a", "c": "b", "d": "c"})

LINES = st.lists(
    st.builds(Line, per_sample=st.floats(0.1, 10), fixed=st.floats(0, 20)), min_size=1, max_size=4
)


def end_s(lines, shares):
    return max(line.at(share) for line, share in zip(lines, shares, strict=True))


@given(LINES, st.integers(4, 14))
def test_no_other_shares_end_earlier(lines, total):
    inner = itertools.combinations(range(1, total), len(lines) - 1)
    divisions = ([b - a for a, b in itertools.pairwise((0, *ends, total))] for ends in inner)
    best_s = min(end_s(lines, shares) for shares in divisions)
    whole = whole_level(lines, total)
    assert sum(whole) == total
    assert min(whole) >= 1
    assert end_s(lines, whole) == pytest.approx(best_s)


def question(kinds: str, schedule: str = "1f1b", **others: object) -> PlanRequest:
    """Devices f and s, of which s takes three times as long; messages that cost little."""
    fast = replace(profile_of(CHAIN, 1e-3), device="f")
    slow = replace(profile_of(CHAIN, 3e-3), device="s")
    devices = tuple(Device(f"d{i}", kind) for i, kind in enumerate(kinds))
    link = Link(bandwidth_bytes_per_s=1e12)
    costs = Costs((fast, slow))
    return PlanRequest(CHAIN, Cluster(devices, link), costs, 32, schedule=schedule, **others)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_data_parallel_shares_by_speed(schedule):
    request = question("fs", schedule)
    plan = PLANNERS["data_parallel"](request)
    (stage,) = plan.stages
    assert stage.shares[0] == 3 * stage.shares[1]
    even = Plan((Stage(0, stage.operators, (0, 1), 2),), num_microbatches=2)
    gain = evaluate_plan(even, request).step_s / evaluate_plan(plan, request).step_s
    assert gain == pytest.approx(2.0, rel=1e-3)  # 16 samples on s become 8
    assert evaluate_plan(plan, request).step_s == pytest.approx(simulate_plan(plan, request).step_s)


@pytest.mark.parametrize("planner", ["graphpipe", "graphpipe_exclusive"])
@pytest.mark.parametrize("kinds", ["fs", "ffs", "fsss"])
def test_searches_share_by_speed(planner, kinds):
    request = question(kinds)
    plan = PLANNERS[planner](request)
    validate_plan(plan, CHAIN, request.num_devices)
    found, simulated = evaluate_plan(plan, request), simulate_plan(plan, request)
    assert found.step_s == pytest.approx(simulated.step_s, rel=0.02)
    fast_s = simulate_plan(
        Plan((Stage(0, tuple(o.name for o in CHAIN), (0,)),), num_microbatches=1), request
    ).step_s
    lines = [Line({"f": fast_s / 32, "s": 3 * fast_s / 32}[kind]) for kind in kinds]
    assert found.step_s <= end_s(lines, whole_level(lines, 32)) * (1 + 1e-3)


def test_stages_on_the_same_devices_take_the_same_shares():
    stages = (Stage(0, ("a", "b"), (0, 1), 2), Stage(1, ("c", "d"), (0, 1), 2))
    plan = levelled(Plan(stages, num_microbatches=8), question("fs"))
    assert plan is not None
    assert [stage.shares for stage in plan.stages] == [(3, 1), (3, 1)]
    assert plan.num_microbatches == 16


def test_equal_devices_keep_equal_shares():
    plan = Plan((Stage(0, ("a", "b", "c", "d"), (0, 1), 2),), num_microbatches=8)
    assert levelled(plan, question("fs")) is not None
    assert levelled(plan, question("ff")) is None
    assert levelled(plan, question("ffs")) is None  # device 2 has no part


def test_what_does_not_fit_into_memory_is_not_taken():
    """The fast device has room for an equal share alone."""
    roomy = question("fs")
    names = tuple(o.name for o in CHAIN)
    even = Plan((Stage(0, names, (0, 1), 2),), num_microbatches=2)
    limit = evaluate_plan(even, roomy).devices[0].memory_bytes
    first, *others = roomy.cluster.devices
    tight = replace(roomy.cluster, devices=(replace(first, memory_bytes=limit), *others))
    request = replace(roomy, cluster=tight, num_microbatches=2)
    assert evaluate_plan(PLANNERS["data_parallel"](request), request).is_feasible
