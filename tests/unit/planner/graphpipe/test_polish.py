"""Single units that the slowest stage of a plan hands over."""

from __future__ import annotations

from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.cost import Costs
from lightning_gpp.planner import Plan, PlanRequest, Stage, evaluate_plan, validate_plan
from lightning_gpp.planner.graphpipe.problem import search_units
from lightning_gpp.planner.graphpipe.refine.polish import polished

BRANCHES = 5
LENGTH = 4


def test_ends_of_two_branches_go_to_the_join_one_after_the_other():
    """Eight layers, eight, and four with the join: seven, seven and six take less.

    The first move does not help, as the other stage is as slow as before.
    """
    operators = {
        f"b{branch}.{layer}": f"b{branch}.{layer - 1}" if layer else "x"
        for branch in range(BRANCHES)
        for layer in range(LENGTH)
    }
    ends = " ".join(f"b{branch}.{LENGTH - 1}" for branch in range(BRANCHES))
    graph = literal_graph(operators | {"join": ends})
    profile = profile_of(graph, {o.name: 0.0 if o.name == "join" else 1.0 for o in graph})
    cluster = uniform_cluster(3, Link(1e30))
    request = PlanRequest(graph, cluster, Costs((profile,)), 64, 16)
    names = [operator.name for operator in graph]
    cuts = zip((0, 8, 16), (8, 16, 21))
    stages = (Stage(n, tuple(names[a:b]), (n,)) for n, (a, b) in enumerate(cuts))
    plan = Plan(tuple(stages), "by hand", num_microbatches=16)
    found = polished(evaluate_plan(plan, request), search_units(request), request)
    assert [len(stage.operators) for stage in found[0].plan.stages] == [7, 7, 7]
    assert found[0].step_s < found[-1].step_s
    assert any(one.plan == plan for one in found)
    for one in found:
        validate_plan(one.plan, graph, 3)


def test_what_cannot_be_cut_stays_in_a_stage_with_replicas():
    """The last operator of two replicas would send what it reads, were it not for its form."""
    for unbatched in ((), ("a",)):
        graph = literal_graph({"a": "x", "b": "a", "c": "b"}, unbatched=unbatched)
        profile = profile_of(graph, {"a": 8.0, "b": 2.0, "c": 1.0})
        request = PlanRequest(graph, uniform_cluster(3, Link(1e30)), Costs((profile,)), 64, 16)
        stages = Stage(0, ("a", "b"), (0, 1), 2), Stage(1, ("c",), (2,), 2)
        plan = Plan(stages, "by hand", num_microbatches=32)
        found = polished(evaluate_plan(plan, request), search_units(request), request)
        for one in found:
            validate_plan(one.plan, graph, 3)
        assert len(found) == (1 if unbatched else 2)
