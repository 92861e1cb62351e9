"""Questions about a schedule that does not drain: mini-batches in a row, versions of weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.graphs import PARAMETER_BYTES, literal_graph, model_graphs, profile_of
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.cluster import Cluster, Device, Link, uniform_cluster
from lightning_gpp.cost import Costs
from lightning_gpp.planner import Plan, PlanRequest, Stage, evaluate_plan
from lightning_gpp.planner import plan_request as question
from lightning_gpp.planner.base import IN_A_ROW, ONE_VERSION, DoesNotFitError, HeldVersions
from lightning_gpp.planner.plan_to_run import PlanQuestion, plan_to_run
from lightning_gpp.schedule import ONE_F_ONE_B_ASYNC
from lightning_gpp.simulate import predicted_timeline, simulate_plan

ASYNC = ONE_F_ONE_B_ASYNC.name
STASH, PREDICTED = HeldVersions(1, None), HeldVersions(1, 2)
KEPT = HeldVersions(1, None, keeps_predictions=True)
GRAPH = literal_graph({"a": "x", "b": "a", "c": "b", "d": "c"})
AT_ONCE = Link(1e15, 0.0)
COSTS = Costs((replace(profile_of(GRAPH), device="any"),))
PLAN = Plan(tuple(Stage(i, (op.name,), (i,)) for i, op in enumerate(GRAPH)))


def asked(held: HeldVersions = ONE_VERSION, schedule: str = ASYNC) -> PlanRequest:
    return question(
        GRAPH,
        uniform_cluster(4, link=AT_ONCE, kind="any"),
        minibatch_size=4,
        costs=COSTS,
        schedule=schedule,
        held_versions=held,
    )


def test_the_pace_is_that_of_the_busiest_stage() -> None:
    """Of 3 ms; filling and draining the pipeline takes 3 more such times."""
    found = evaluate_plan(PLAN, asked())
    assert found.minibatch_s == pytest.approx(3e-3 * (IN_A_ROW + 3) / IN_A_ROW, rel=1e-6)
    assert simulate_plan(PLAN, asked()).minibatch_s == pytest.approx(found.minibatch_s)
    for count in (1, 2, 4):  # micro-batches of a pipeline that drains: (m + D - 1) / m as long
        drained = replace(asked(schedule="1f1b"), num_microbatches=count)
        plan = replace(PLAN, num_microbatches=count)
        expected = pytest.approx((count + 4 - 1) / count * 3e-3, rel=1e-6)
        assert evaluate_plan(plan, drained).minibatch_s == expected
        assert simulate_plan(plan, drained).minibatch_s == expected


@pytest.mark.parametrize(
    ("held", "versions"),
    [
        (ONE_VERSION, [1, 1, 1, 1]),
        (PREDICTED, [2, 2, 2, 1]),
        (STASH, [4, 3, 2, 1]),
        (HeldVersions(2, 2), [2, 2, 2, 2]),
        (KEPT, [6, 5, 4, 1]),
        (STASH._replace(per_update=2), [3, 2, 2, 1]),
        (STASH._replace(per_update=8), [2, 2, 2, 1]),
        (PREDICTED._replace(per_update=8), [2, 2, 2, 1]),
        (KEPT._replace(per_update=2), [6, 5, 3, 1]),
    ],
)
def test_versions_take_memory(held: HeldVersions, versions: list[int]) -> None:
    found = evaluate_plan(PLAN, asked(held))
    alone = evaluate_plan(PLAN, asked())
    more = [
        device.memory_bytes - other.memory_bytes
        for device, other in zip(found.devices, alone.devices, strict=True)
    ]
    assert more == [(count - 1) * PARAMETER_BYTES for count in versions]
    simulated = predicted_timeline(simulate_plan(PLAN, asked(held))).memory
    assert [curve.peak_bytes for curve in simulated] == [
        device.memory_bytes for device in found.devices
    ]


@given(
    st.data(),
    st.sampled_from([ONE_VERSION, PREDICTED, STASH, KEPT, HeldVersions(2, 2)]),
    st.integers(1, 4),
)
def test_a_planned_pipeline_fits_with_its_versions(
    data: st.DataObject, held: HeldVersions, per_update: int
) -> None:
    held = held._replace(per_update=per_update)
    graph = data.draw(model_graphs(min_operators=3))
    limit = data.draw(st.integers(1, 40)) * PARAMETER_BYTES
    devices = tuple(Device(str(i), kind="any", memory_bytes=limit) for i in range(3))
    costs = Costs((replace(profile_of(graph), device="any"),))
    cluster = Cluster(devices, AT_ONCE)
    request = question(graph, cluster, minibatch_size=4, costs=costs, held_versions=held)
    try:
        answered = plan_to_run(PlanQuestion(request, "graphpipe", ASYNC))
    except DoesNotFitError:
        return
    assert answered.request.num_minibatches == IN_A_ROW
    assert evaluate_plan(answered.plan, answered.request).is_feasible
