"""Plans whose stages share devices, on random models."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import islice

import pytest
from helpers.graphs import model_graphs, profiles
from helpers.series_parallel import shapes, tree_of
from helpers.shared_brute_force import best_shared_step_s
from helpers.small_requests import SETTINGS, chain_request, random_request
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.cost import Costs
from lightning_gpp.planner import PlanRequest, evaluate_plan, plan_request, validate_plan
from lightning_gpp.planner.base import DoesNotFitError
from lightning_gpp.planner.graphpipe.bounds import DraftBounds
from lightning_gpp.planner.graphpipe.draft import (
    Draft,
    DraftStage,
    UnitTables,
    arranged,
    draft_of,
    plan_of,
)
from lightning_gpp.planner.graphpipe.homes import Homes, OwnHomes
from lightning_gpp.planner.graphpipe.moves import FAMILIES
from lightning_gpp.planner.graphpipe.planner import (
    climbed,
    graphpipe,
)
from lightning_gpp.planner.make_plan import PLANNERS
from lightning_gpp.planner.step_time.pipeline_run import PipelineRun
from lightning_gpp.simulate import simulate_plan

BUDGET = 2000
"""Looks: enough for some moves of every family on small models."""

WORST_LOSS = 1.05
"""How much longer the step of a small model may be than the best one."""

OTHERS = ("data_parallel", "graphpipe_exclusive", "sequential", "balanced")


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    """Devices of one kind or two, in one host or two, with or without limits of memory."""
    graph = draw(model_graphs(min_operators=2))
    own = draw(profiles(graph))
    slower = {
        name: replace(op, forward_s=2 * op.forward_s, backward_s=3 * op.backward_s)
        for name, op in own.operators.items()
    }
    kinds = draw(st.sampled_from(["a", "aa", "aaa", "aaaa", "ab", "aabb"]))
    limit = draw(st.sampled_from([None, None, 2 * 10**6, 2 * 10**7]))
    num_hosts = draw(st.sampled_from([1, 2]))
    devices = tuple(
        Device(f"{i}", kind, memory_bytes=limit, host=f"{i % num_hosts}")
        for i, kind in enumerate(kinds)
    )
    return plan_request(
        graph,
        Cluster(devices, Link(1e9), Link(1e7, 1e-4)),
        minibatch_size=draw(st.sampled_from([4, 8, 12])),
        costs=Costs((replace(own, device="a"), replace(own, operators=slower, device="b"))),
        num_microbatches=draw(st.sampled_from([None, None, None, 2])),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
        may_recompute=draw(st.booleans()),
    )


def step_s(planner: str, request: PlanRequest) -> float | None:
    """Seconds of another planner's plan; None where it has none that fits."""
    try:
        found = evaluate_plan(PLANNERS[planner](request), request)
    except ValueError:
        return None
    return found.step_s if found.is_feasible else None


@given(requests())
def test_plans_can_run_and_are_never_worse_than_those_of_others(request):
    others = {planner: step_s(planner, request) for planner in OTHERS}
    try:
        plan = graphpipe(request, BUDGET)
    except DoesNotFitError:
        assert set(others.values()) == {None}
        return
    validate_plan(plan, request.graph, request.num_devices)
    found = evaluate_plan(plan, request)
    assert found.is_feasible
    for other_s in others.values():
        assert other_s is None or found.step_s <= other_s
    assert found.step_s == pytest.approx(simulate_plan(plan, request).step_s, rel=0.02)


@given(requests(), st.integers(0, 2000), st.sampled_from([1, 60, 6000]))
def test_a_larger_budget_never_gives_a_worse_plan(request, budget, more):
    less, much = (climbed(request, looks)[0] for looks in (budget, budget + more))
    assert much.best_s <= less.best_s


@st.composite
def drafts(draw: st.DrawFn, homes: type[Homes] = Homes) -> tuple[Draft, UnitTables]:
    """What a few random moves make of the whole model on one device.

    Args:
        draw: of hypothesis.
        homes: the groups of devices that stages may go to.
    """
    tables = UnitTables(draw(requests()))
    bounds = DraftBounds(tables)
    count = tables.request.num_microbatches or 1
    draft = Draft((DraftStage(tables.everything, (0,)),), count)
    assume(can_run(draft, bounds))
    for _ in range(draw(st.integers(1, 6))):
        family = draw(st.sampled_from(FAMILIES))
        near = islice(family(draft, homes(draft, tables)), 40)
        moved = [replace_stages(one, tables) for one in near]
        able = [one for one in moved if one is not None and can_run(one, bounds)]
        draft = draw(st.sampled_from(able)) if able else draft
    return draft, tables


def can_run(draft: Draft, bounds: DraftBounds) -> bool:
    """Whether a draft, with its stages in order, keeps to all rules."""
    return bounds.busiest_s(draft) < math.inf and bounds.least_s(draft) < math.inf


def replace_stages(draft: Draft, tables: UnitTables) -> Draft | None:
    """With stages in order."""
    stages = arranged(draft.stages, tables)
    return None if stages is None else draft._replace(stages=stages)


@given(st.one_of(drafts(), drafts(OwnHomes)))
@settings(max_examples=4 * settings.default.max_examples)
def test_what_moves_make_can_run_and_takes_as_long_as_its_bound_at_least(drawn):
    draft, tables = drawn
    plan = plan_of(draft, tables, "graphpipe")
    request = tables.request
    validate_plan(plan, request.graph, request.num_devices)
    found, run = evaluate_plan(plan, request), PipelineRun(plan, request)
    bounds = DraftBounds(tables)
    assert bounds.busiest_s(draft) <= found.step_s * (1 + 1e-9)
    assert bounds.least_s(draft) <= found.step_s * (1 + 1e-9)
    assert bounds.busiest_s(draft) == pytest.approx(run.busiest_s(), rel=1e-9)
    assert found.step_s == pytest.approx(simulate_plan(plan, request).step_s, rel=0.02)
    again = draft_of(plan, tables)
    assert again == draft.reduced()
    least_s = bounds.least_s(draft, is_chain=True)
    assert bounds.least_s(draft) <= least_s * (1 + 1e-9)  # it waits for more
    chain_s = evaluate_plan(replace(plan, is_chain=True), request).step_s
    assert least_s <= chain_s * (1 + 1e-9)


@pytest.mark.parametrize("setting", ["equal", "three", "hosts"])
def test_small_models_are_planned_nearly_as_well_as_by_brute_force(setting):
    """Without replicas; brute force gives all stages one size of micro-batches."""
    rng = random.Random(setting)
    for _ in range(2):
        tree = tree_of(rng.choice(shapes(4)))
        request = replace(random_request(tree, SETTINGS[setting], rng), max_replicas=1)
        found_s = evaluate_plan(graphpipe(request), request).step_s
        assert found_s <= WORST_LOSS * best_shared_step_s(tree, request)


@pytest.mark.parametrize(("setting", "draws"), [("messages", 20), ("four of two kinds", 28)])
def test_a_single_move_may_not_be_enough(setting, draws):
    """Two moves are needed; with two kinds one swaps two stages and leaves the loss where it is."""
    rng = random.Random(f"shared {setting} 4")
    for _ in range(draws):
        tree = tree_of(rng.choice(shapes(4)))
        request = replace(random_request(tree, SETTINGS[setting], rng), max_replicas=1)
    found_s = evaluate_plan(graphpipe(request), request).step_s
    assert found_s <= WORST_LOSS * best_shared_step_s(tree, request)


@pytest.mark.parametrize(
    ("num_layers", "num_devices", "num_microbatches"), [(4, 2, 6), (12, 3, 3), (16, 4, 4)]
)
def test_an_interleaved_plan_is_found_on_a_uniform_chain(num_layers, num_devices, num_microbatches):
    """Layers in turn, as in 0 1 0 1: less time until all devices have something to do."""
    request = chain_request(num_layers, num_devices, num_microbatches)
    found = graphpipe(request)
    assert len(found.stages) > num_devices
    exclusive_s = step_s("graphpipe_exclusive", request)
    assert exclusive_s is not None
    assert evaluate_plan(found, request).step_s < exclusive_s


def test_layers_do_not_take_turns_where_messages_take_too_long():
    """A message as long as four layers; ties and losses go to fewer stages."""
    found = graphpipe(chain_request(16, 2, 4, message_s=0.012))
    assert len(found.stages) <= 2
