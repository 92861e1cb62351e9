"""Local search next to good plans, and each kind of its changes."""

from __future__ import annotations

import math

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.planner import Plan, PlanEvaluation, PlanRequest, Stage, evaluate_plan
from lightning_gpp.planner.graphpipe.problem import branching, search_units
from lightning_gpp.planner.graphpipe.refine.climb import Budget, Climb, budget_for
from lightning_gpp.planner.graphpipe.refine.division import Divider, Division, division_of, tidied
from lightning_gpp.planner.graphpipe.refine.neighbours import (
    merged,
    paced,
    shifted,
    staffed,
    swapped,
)
from lightning_gpp.planner.graphpipe.space.crew import Crew

LAYERS = 8
KINDS = {
    "staffed": staffed,
    "merged": merged,
    "paced": paced,
    "shifted": shifted,
    "swapped": swapped,
}


def chain_request() -> PlanRequest:
    """Eight layers without parameters that take a second per sample, on four devices."""
    names = [f"layer{index}" for index in range(LAYERS)]
    graph = literal_graph(dict(zip(names, ["x", *names])), parameters={n: [] for n in names})
    profiles = [
        Profile({n: OpProfile(size / 3, 2 * size / 3) for n in names}, size)
        for size in (1, 2, 4, 8)
    ]
    cluster = uniform_cluster(4, Link(1e30))
    return PlanRequest(graph, cluster, Costs(tuple(profiles)), minibatch_size=32)


def plan_of(
    request: PlanRequest, stages: list[tuple[int, int, int]], num_microbatches: int
) -> PlanEvaluation:
    """What a chain does, given (layers, replicas, micro-batch multiple) of its stages."""
    names = [operator.name for operator in request.graph]
    made, start, device = [], 0, 0
    for number, (length, replicas, multiple) in enumerate(stages):
        operators = tuple(names[start : start + length])
        devices = tuple(range(device, device + replicas))
        made.append(Stage(number, operators, devices, multiple))
        start, device = start + length, device + replicas
    return evaluate_plan(Plan(tuple(made), "by hand", num_microbatches), request)


def divider_of(request: PlanRequest) -> Divider:
    return Divider(branching(request, search_units(request)), "climbed", is_chain=False)


def best_of(seed: PlanEvaluation, request: PlanRequest, *kinds: str) -> PlanEvaluation:
    """The best plan that changes of some kinds lead to."""
    budget = Budget(
        tuple(KINDS[kind] for kind in kinds), 1, patience=5, num_parts=2000, num_played=20_000
    )
    climb = Climb(divider_of(request), budget)
    climb.up_from(seed)
    return min([seed, *climb.found], key=lambda found: found.step_s)


def shape(found: PlanEvaluation) -> list[tuple[int, int, int]]:
    return [(len(s.operators), s.num_replicas, s.microbatch_multiple) for s in found.plan.stages]


@pytest.mark.parametrize(
    ("kind", "stages", "count", "better"),
    [
        ("shifted", [(3, 1, 1), (1, 1, 1), (2, 1, 1), (2, 1, 1)], 32, [(2, 1, 1)] * 4),
        ("merged", [(1, 1, 1), (1, 1, 1), (3, 1, 1), (3, 1, 1)], 32, [(8, 4, 4)]),
        ("staffed", [(4, 1, 1), (4, 1, 1)], 32, [(8, 4, 4)]),
        ("paced", [(2, 1, 1)] * 4, 4, [(2, 1, 1)] * 4),
    ],
)  # fmt: skip
def test_each_kind_of_change_helps_where_it_should(kind, stages, count, better):
    request = chain_request()
    seed = plan_of(request, stages, count)
    found = best_of(seed, request, kind)
    assert found.step_s < seed.step_s * 0.95
    if kind == "paced":
        assert found.plan.num_microbatches > count
    else:
        assert shape(found) == better


ONE, TWO = Crew(1, 0, 1), Crew(2, 0, 2)


def changes(kind: str, stages: list[tuple[int, int, int]], count: int) -> set[Division]:
    """All changes of a kind of a plan."""
    request = chain_request()
    divider = divider_of(request)
    division = division_of(plan_of(request, stages, count).plan, divider.problem)
    assert division is not None
    return set(KINDS[kind](division, divider, math.inf))


def test_borders_move_up_to_the_end_of_a_part_and_then_it_is_gone():
    found = changes("shifted", [(2, 2, 2), (6, 1, 1)], 32)
    assert found == {
        *(Division(((stop, 0), (8, 1)), (TWO, ONE), 1.0) for stop in (1, 3, 4, 6)),
        Division(((8, 0),), (ONE,), 1.0),
    }


def test_neighbours_become_one_on_the_devices_of_the_larger_or_of_both():
    assert changes("merged", [(2, 2, 2), (6, 1, 1)], 32) == {Division(((8, 0),), (TWO,), 1.0)}
    assert changes("merged", [(2, 1, 1), (6, 1, 1)], 32) == {
        Division(((8, 0),), (crew,), 1.0) for crew in (ONE, TWO)
    }


def test_a_part_or_all_take_other_numbers_of_samples_at_a_time():
    stops = (2, 0), (8, 1)
    found = changes("paced", [(2, 2, 2), (6, 1, 1)], 16)
    assert found == {
        Division(stops, (Crew(2, 0, 4), ONE), 2.0),
        Division(stops, (Crew(2, 0, 1), ONE), 2.0),
        Division(stops, (TWO, Crew(1, 0, 2)), 2.0),
        Division(stops, (Crew(2, 0, 4), ONE), 1.0),
        Division(stops, (TWO, ONE), 1.0),
        Division(stops, (TWO, ONE), 4.0),
        Division(stops, (Crew(2, 0, 1), ONE), 4.0),
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([1, 1], {(1, 1), (1, 2), (2, 1), (1, 1, 1), (1,), (2,)}),  # two devices are idle
        ([4], {(4,), (2, 2), (2,)}),
        ([2, 2], {(2, 2), (1, 1, 2), (2, 1, 1), (4,), (1, 2), (2, 1), (2,)}),
    ],
)
def test_devices_are_taken_from_idle_ones_or_other_parts(before, after):
    length = LAYERS // len(before)
    found = changes("staffed", [(length, count, count) for count in before], 32)
    counts = {tuple(crew.num_replicas for crew in one.crews) for one in found}
    assert after <= counts
    assert all(sum(one) <= 4 for one in counts)


def test_pieces_that_are_empty_or_go_on_are_gone():
    stops = [(2, 1), (2, 0), (5, 1), (8, 2)]
    found = tidied(stops, [TWO, ONE, TWO], 1.0)
    assert found == Division(((5, 0), (8, 1)), (ONE, TWO), 1.0)


def test_a_plan_that_divides_units_or_mixes_kinds_is_no_division():
    request = chain_request()
    divider = divider_of(request)
    whole = plan_of(request, [(8, 1, 1)], 32).plan
    found = division_of(whole, divider.problem)
    assert found == Division(((8, 0),), (ONE,), 1.0)
    with pytest.raises(ValueError, match="no number of micro-batches"):
        division_of(Plan(whole.stages), divider.problem)


def test_a_budget_of_nothing_evaluates_nothing():
    request = chain_request()
    climb = Climb(
        divider_of(request), Budget((paced,), 1, patience=5, num_parts=2000, num_played=0)
    )
    climb.up_from(plan_of(request, [(8, 1, 1)], 32))
    assert not climb.found


def test_two_pieces_change_places():
    stops = (2, 0), (3, 1), (4, 0), (6, 1)
    assert set(swapped(Division(stops, (TWO, ONE), 1.0))) == {
        Division(((2, 0), (4, 1), (6, 0)), (ONE, TWO), 1.0),
        Division(((2, 0), (4, 1), (6, 0)), (TWO, ONE), 1.0),
        Division(((3, 0), (6, 1)), (ONE, TWO), 1.0),
        Division(((3, 0), (6, 1)), (TWO, ONE), 1.0),
    }
    assert not list(swapped(Division(((2, 0), (6, 1)), (TWO, ONE), 1.0)))


def test_branches_change_places_where_no_single_move_helps():
    """Branches of 5, 4, 2 and 1 seconds: 5 + 2 and 4 + 1 become 5 + 1 and 4 + 2."""
    seconds = {"five": 5.0, "four": 4.0, "two": 2.0, "one": 1.0, "join": 0.0}
    reads = dict.fromkeys(seconds, "x") | {"join": "five four two one"}
    graph = literal_graph(reads, parameters={name: [] for name in reads})
    costs = Costs((profile_of(graph, seconds),))
    request = PlanRequest(graph, uniform_cluster(2, Link(1e30)), costs, 16, 16)
    stages = Stage(0, ("five", "two"), (0,)), Stage(1, ("four", "one", "join"), (1,))
    seed = evaluate_plan(Plan(stages, "by hand", 16), request)
    assert best_of(seed, request, "shifted", "merged", "paced").step_s == seed.step_s
    found = best_of(seed, request, "swapped")
    work = [sum(seconds[name] for name in stage.operators) for stage in found.plan.stages]
    assert work == [6.0, 6.0]


def test_models_in_a_line_have_the_largest_budget_and_branches_on_many_devices_the_smallest():
    seconds = dict.fromkeys("abcdefgh", 1.0) | {"join": 0.0}
    reads = dict.fromkeys("abcdefgh", "x") | {"join": "a b c d e f g h"}
    graph = literal_graph(reads)
    costs = Costs((profile_of(graph, seconds),))
    found = {
        count: budget_for(
            divider_of(PlanRequest(graph, uniform_cluster(count, Link(1e9)), costs, 32)).problem
        )
        for count in (4, 32)
    }
    assert budget_for(divider_of(chain_request()).problem).num_parts > found[4].num_parts
    assert found[4].num_parts > found[32].num_parts
    assert found[32].changes == (paced,)
