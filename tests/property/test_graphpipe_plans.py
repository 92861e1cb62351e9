"""The planners ``graphpipe_exclusive`` and ``sequential`` on random models."""

from __future__ import annotations

import math

import pytest
from helpers.graphs import model_graphs, profiles
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_gpp.cost import Costs
from lightning_gpp.planner import PlanRequest, validate_plan
from lightning_gpp.planner.data_parallel import shared_by_all
from lightning_gpp.planner.graphpipe.choice import Divisions, placed
from lightning_gpp.planner.graphpipe.draft import UnitTables, plan_of
from lightning_gpp.planner.graphpipe.planner import search_exclusive
from lightning_gpp.planner.graphpipe.space import Problem
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
def test_graphpipe_is_never_slower_than_sequential(request):
    best = search_exclusive(request).ranked[0].step_s
    assert best <= evaluate_plan(PLANNERS["sequential"](request), request).step_s * (1 + 1e-9)


@given(requests())
def test_graphpipe_is_never_slower_than_data_parallelism(request):
    shared = shared_by_all(request, "data_parallel")
    assume(shared is not None)
    best = evaluate_plan(PLANNERS["graphpipe_exclusive"](request), request)
    assert best.step_s <= shared.step_s * (1 + 1e-9)


ABOUT = 1.15
"""The least step of a space leaves out how stages beside the longest way overlap."""


@given(requests(), st.booleans(), st.booleans())
def test_no_plan_is_faster_than_the_least_step_of_its_space(request, is_chain, take_turns):
    problem = Problem(UnitTables(request))
    for size in request.microbatch_sizes:
        space = problem.space(size, take_turns=take_turns)
        divisions = Divisions(space)
        found = [divisions.at(math.inf), *divisions.narrowed()]
        for stages in {stages for one in found if one for stages in one.divisions}:
            for draft in placed(stages, size, request):
                plan = plan_of(draft, problem.tables, "graphpipe", is_chain=is_chain)
                validate_plan(plan, request.graph, request.num_devices)
                assert evaluate_plan(plan, request).step_s >= space.least.step_s / ABOUT
