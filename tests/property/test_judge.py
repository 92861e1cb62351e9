"""Planners judge plans by the step that the simulator finds, replicas included."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from helpers.graphs import model_graphs, profiles
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.cluster import Cluster, ClusterLayout, HostGroup, Link
from lightning_gpp.cost import Costs
from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner import (
    PLANNERS,
    Plan,
    PlanRequest,
    evaluate_plan,
    plan_graph,
    plan_request,
)
from lightning_gpp.planner.graphpipe.bounds import least_plan_s
from lightning_gpp.planner.graphpipe.climb import BUDGET
from lightning_gpp.planner.graphpipe.planner import graphpipe
from lightning_gpp.schedule import GPIPE_REVERSED, ONE_F_ONE_B_ASYNC, SCHEDULES, find_schedule
from lightning_gpp.simulate import simulate_plan

ASYNC = ONE_F_ONE_B_ASYNC.name

FINDS = PLANNERS | {"graphpipe": partial(graphpipe, budget=BUDGET // 20)}
"""The search is short: the judge and the simulator must agree on any plan, good or not."""


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Two hosts of two or four devices; links of their own, shared ones, half duplex."""
    per_host = draw(st.sampled_from([2, 4]))
    links = [
        Link(
            draw(st.sampled_from([1e7, 1e9])),
            draw(st.sampled_from([0.0, 1e-4])),
            is_shared=draw(st.booleans()),
            is_full_duplex=draw(st.booleans()),
        )
        for _ in range(2)
    ]
    return ClusterLayout((HostGroup("any", per_host),), *links).cluster(draw(st.integers(2, 6)))


@st.composite
def requests(draw: st.DrawFn, schedule: str, graph: ModelGraph) -> PlanRequest:
    """Questions of every schedule."""
    is_reversed = find_schedule(schedule).reverses
    return plan_request(
        graph,
        draw(clusters()),
        minibatch_size=draw(st.sampled_from([8, 12])),
        num_microbatches=4 if is_reversed else None,
        max_replicas=1 if is_reversed else None,
        costs=Costs((replace(draw(profiles(graph)), device="any"),)),
        schedule=schedule,
        may_recompute=draw(st.booleans()),
        inputs_ahead=draw(st.booleans()),
    )


def planned(planner: str, request: PlanRequest) -> Plan | None:
    try:
        return FINDS[planner](request)
    except ValueError:  # there is none
        return None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", [*sorted(SCHEDULES), GPIPE_REVERSED.name, ASYNC])
@pytest.mark.parametrize("planner", sorted(PLANNERS))
@given(st.data())
def test_the_judge_finds_the_step_of_the_simulator(planner, schedule, data):
    graph = data.draw(model_graphs(min_operators=3))
    request = data.draw(requests(schedule, graph))
    plan = planned(planner, request)
    if plan is None or (schedule == ASYNC and plan_graph(plan, graph).stages.shared_parameters):
        return
    found, simulation = evaluate_plan(plan, request), simulate_plan(plan, request)
    assert found.step_s == pytest.approx(simulation.step_s, rel=ROUNDING)
    assert found.minibatch_s == pytest.approx(simulation.minibatch_s, rel=ROUNDING)
    assert least_plan_s(plan, request) <= found.step_s * (1 + ROUNDING)
