"""What runs on emulated devices takes the time that its simulation says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.graphs import model_graphs
from helpers.plan_cases import ORDER_PACES, is_valid
from helpers.small_requests import chain_request
from helpers.threads.emulate import emulate_plan
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_gpp.cluster import ClusterLayout, HostGroup, Link
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner import Plan, PlanRequest, Stage, answer, evaluate_plan, plan_request
from lightning_gpp.schedule import SCHEDULES
from lightning_gpp.simulate import simulate_plan

EXACT = 1e-6
"""The clock of the emulation counts nanoseconds."""


@st.composite
def shared_plans(draw: st.DrawFn, graph: ModelGraph) -> Plan:
    """Stages on up to four devices that several of them share, some with replicas."""
    names = [operator.name for operator in graph]
    cuts = sorted(draw(st.sets(st.integers(1, len(names) - 1), max_size=4)))
    pieces = zip([0, *cuts], [*cuts, len(names)], strict=True)
    num_microbatches = draw(st.sampled_from([1, 1, 2, 4]))
    multiples = st.sampled_from([m for m in (1, 2, 4) if num_microbatches % m == 0])
    stages = []
    for number, (start, stop) in enumerate(pieces):
        multiple = draw(multiples)
        num_devices = draw(st.sampled_from([count for count in (1, 2, 4) if count <= multiple]))
        devices = draw(st.permutations(range(4)))[:num_devices]
        operators = tuple(names[start:stop])
        stages.append(Stage(number, operators, tuple(devices), microbatch_multiple=multiple))
    used = sorted({device for stage in stages for device in stage.devices})
    renamed = [replace(s, devices=tuple(map(used.index, s.devices))) for s in stages]
    pace = draw(ORDER_PACES)
    return Plan(tuple(renamed), num_microbatches=num_microbatches, order_pace=pace)


@st.composite
def questions(draw: st.DrawFn) -> tuple[Plan, PlanRequest]:
    """No two things take equally long: which of two messages is first is no matter of rounding."""
    graph = draw(model_graphs(min_operators=3, with_state=False))
    plan = draw(shared_plans(graph))
    assume(is_valid(plan, graph))
    random = draw(st.randoms(use_true_random=False))
    operators = {
        operator.name: OpProfile(random.uniform(1e-3, 4e-3), random.uniform(2e-3, 8e-3), 0)
        for operator in graph
    }
    profile = Profile(operators, microbatch_size=graph.microbatch_size, device="any")
    links = [
        Link(random.uniform(1e6, 1e7), random.uniform(0.0, 1e-3), is_shared=draw(st.booleans()))
        for _ in range(2)
    ]
    assert plan.num_microbatches is not None
    return plan, plan_request(
        graph,
        ClusterLayout((HostGroup("any", 2),), *links).cluster(plan.num_devices),
        minibatch_size=4 * plan.num_microbatches,
        costs=Costs((profile,)),
        schedule=draw(st.sampled_from(sorted(SCHEDULES))),
    )


@given(questions())
def test_an_emulated_step_takes_what_is_simulated(question: tuple[Plan, PlanRequest]) -> None:
    plan, request = question
    step_s, slip_s = emulate_plan(plan, request)
    assert slip_s < 1e-6  # rounding
    assert step_s == pytest.approx(simulate_plan(plan, request).step_s, rel=EXACT)


@pytest.mark.parametrize("num_devices", [2, 3])
def test_a_step_of_layers_in_turn_takes_what_was_planned(num_devices: int) -> None:
    request = chain_request(24, num_devices, 2 * num_devices)
    plan = answer(request, "graphpipe")
    assert plan.num_stages > num_devices
    planned_s = evaluate_plan(plan, request).step_s
    assert emulate_plan(plan, request)[0] == pytest.approx(planned_s, rel=0.01)
