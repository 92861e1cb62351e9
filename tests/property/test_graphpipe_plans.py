"""The planners ``graphpipe_exclusive`` and ``sequential`` on random models."""

from __future__ import annotations

import pytest
from helpers.graphs import model_graphs, profiles
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_gpp.cost import Costs
from lightning_gpp.planner import PlanRequest, validate_plan
from lightning_gpp.planner.data_parallel import shared_by_all
from lightning_gpp.planner.make_plan import PLANNERS, plan_request
from lightning_gpp.planner.step_time.evaluate import evaluate_plan


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    graph = draw(model_graphs())
    return plan_request(
        graph,
        draw(st.integers(1, 6)),
        minibatch_size=draw(st.sampled_from([4, 8, 12])),
        costs=Costs((draw(profiles(graph)),)),
        num_microbatches=draw(st.sampled_from([None, None, 1, 2])),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
    )


@pytest.mark.parametrize("planner", ["graphpipe_exclusive", "sequential"])
@given(requests())
def test_plans_are_valid(planner, request):
    plan = PLANNERS[planner](request)
    validate_plan(plan, request.graph, request.num_devices)
    assert evaluate_plan(plan, request).is_feasible
    assert plan.is_chain == (planner == "sequential")
    homes = [device for stage in plan.stages for device in stage.devices]
    assert len(homes) == len(set(homes))


@given(requests())
def test_graphpipe_is_never_slower_than_data_parallelism(request):
    shared = shared_by_all(request, "data_parallel")
    assume(shared is not None)
    best = evaluate_plan(PLANNERS["graphpipe_exclusive"](request), request)
    assert best.step_s <= shared.step_s * (1 + 1e-9)
