"""Local search on random models: what it finds is valid, fits, and is never worse than its seed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from helpers.series_parallel import shapes, tree_of
from helpers.small_requests import SETTINGS, random_request
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_gpp.planner import PlanRequest, answer, evaluate_plan, validate_plan
from lightning_gpp.planner.graphpipe.problem import branching, search_units
from lightning_gpp.planner.graphpipe.refine.climb import climbed
from lightning_gpp.planner.graphpipe.refine.division import Divider, division_of


@st.composite
def questions(draw: st.DrawFn) -> PlanRequest:
    rng = random.Random(draw(st.integers(0, 2**32)))
    setting = SETTINGS[draw(st.sampled_from(sorted(SETTINGS)))]
    request = random_request(tree_of(rng.choice(shapes(draw(st.integers(2, 6))))), setting, rng)
    return replace(
        request,
        num_microbatches=draw(st.sampled_from([None, None, 4])),
        max_replicas=draw(st.sampled_from([None, None, 1, 2])),
        schedule=draw(st.sampled_from(["1f1b", "1f1b", "gpipe"])),
    )


@pytest.mark.parametrize("is_chain", [False, True])
@given(questions(), st.sampled_from(["balanced", "pipedream"]))
@settings(max_examples=60)
def test_what_is_found_is_valid_and_no_worse(is_chain, request, planner):
    try:
        seed = evaluate_plan(answer(request, planner), request)
    except ValueError:
        assume(False)  # nothing of this planner fits into memory
    divider = Divider(branching(request, search_units(request)), "climbed", is_chain)
    found = climbed([replace(seed, plan=replace(seed.plan, is_chain=is_chain))], [], divider)
    assert found[0].step_s <= seed.step_s
    for one in found[:-1]:
        plan = one.plan
        assert one.is_feasible
        if plan.planner != "climbed":
            continue
        validate_plan(plan, request.graph, request.num_devices)
        assert plan.is_chain == is_chain
        assert request.may_recompute or not any(stage.recompute for stage in plan.stages)
        for stage in plan.stages:
            kinds = {request.cluster.devices[device].kind for device in stage.devices}
            assert len(kinds) == 1
            assert stage.num_replicas <= (request.max_replicas or request.num_devices)
        if request.num_microbatches is not None:
            assert len({stage.microbatch_multiple for stage in plan.stages}) == 1
        assert division_of(plan, divider.problem) is not None
