"""Replicas of unequal shares on unequal devices: the judge, its bound, and the simulator."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from helpers.graphs import literal_graph, model_graphs, profiles
from helpers.plan_cases import is_valid
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_gpp.cluster import Cluster, Device, Link, uniform_cluster
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner import Plan, PlanRequest, Stage, evaluate_plan, plan_request
from lightning_gpp.planner.graphpipe.bounds import least_plan_s
from lightning_gpp.schedule import SCHEDULES
from lightning_gpp.simulate import simulate_plan

WITHIN = 1e-8


def slower(profile: Profile, times: float) -> Profile:
    """The costs of a device so many times as slow."""
    operators = {
        name: OpProfile(times * one.forward_s, times * one.backward_s, one.activation_bytes)
        for name, one in profile.operators.items()
    }
    return replace(profile, operators=operators)


@st.composite
def unequal_plans(draw: st.DrawFn, graph: ModelGraph) -> Plan:
    """Stages in a line with up to three replicas each, on devices of their own."""
    names = [operator.name for operator in graph]
    borders = sorted(draw(st.sets(st.integers(1, len(names) - 1), max_size=2)))
    stages, device = [], 0
    for number, (start, end) in enumerate(itertools.pairwise([0, *borders, len(names)])):
        multiple = draw(st.sampled_from([4, 8]))
        count = draw(st.integers(1, 3))
        ends = sorted(draw(st.permutations(range(1, multiple)))[: count - 1])
        shares = tuple(b - a for a, b in itertools.pairwise([0, *ends, multiple]))
        home = tuple(range(device, device + count))
        device += count
        stages.append(Stage(number, tuple(names[start:end]), home, multiple, shares=shares))
    return Plan(tuple(stages), num_microbatches=8 * draw(st.sampled_from([1, 2])))


@st.composite
def cases(draw: st.DrawFn, schedule: str) -> tuple[Plan, PlanRequest]:
    """A plan on devices of two speeds."""
    graph = draw(model_graphs(min_operators=3, with_state=False))
    plan = draw(unequal_plans(graph))
    assume(is_valid(plan, graph))
    kinds = [draw(st.sampled_from(["fast", "slow"])) for _ in range(plan.num_devices)]
    fast = replace(draw(profiles(graph)), device="fast")
    slow = replace(slower(fast, draw(st.sampled_from([1.3, 4.0]))), device="slow")
    devices = tuple(Device(f"d{i}", kind) for i, kind in enumerate(kinds))
    link = Link(draw(st.sampled_from([1e7, 1e9])), draw(st.sampled_from([0.0, 1e-4])))
    request = PlanRequest(
        graph,
        cluster=Cluster(devices, link),
        costs=Costs((fast, slow)),
        minibatch_size=4 * (plan.num_microbatches or 1),
        schedule=schedule,
    )
    return plan, request


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@given(st.data())
def test_every_replica_goes_at_its_own_pace(schedule, data):
    plan, request = data.draw(cases(schedule))
    found, simulation = evaluate_plan(plan, request), simulate_plan(plan, request)
    assert found.step_s == pytest.approx(simulation.step_s, rel=WITHIN)
    assert least_plan_s(plan, request) <= found.step_s * (1 + 1e-9)
    for device in found.devices:
        peak_bytes = max(size for _, size in simulation.device_memory[device.device])
        assert peak_bytes <= device.memory_bytes + 1


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@given(st.data())
def test_bounds_hold_for_equal_shares_on_unequal_devices(schedule, data):
    plan, request = data.draw(cases(schedule))
    stages = tuple(
        Stage(one.id, one.operators, one.devices[: 1 + (one.num_replicas > 1)], 4)
        for one in plan.stages
    )
    plan = replace(plan, stages=stages)
    assume(is_valid(plan, request.graph))
    found, simulation = evaluate_plan(plan, request), simulate_plan(plan, request)
    assert found.step_s == pytest.approx(simulation.step_s, rel=WITHIN)
    assert least_plan_s(plan, request) <= found.step_s * (1 + 1e-9)


def test_inputs_that_arrive_one_after_the_other():
    """Replicas of the last stage begin at different times, so their losses end at others, too."""
    graph = literal_graph({"a": "x", "b": "a"})
    costs = Profile({name: OpProfile(1e-3, 2e-3, 100) for name in "ab"}, microbatch_size=4)
    stages = Stage(0, ("a",), (0, 1), 2), Stage(1, ("b",), (2, 3), 4)
    plan, cluster = Plan(stages, num_microbatches=8), uniform_cluster(4, Link(1e9))
    request = plan_request(graph, cluster, costs=costs, minibatch_size=32, schedule="1f1b")
    found, simulation = evaluate_plan(plan, request), simulate_plan(plan, request)
    assert found.step_s == pytest.approx(simulation.step_s, rel=WITHIN)
