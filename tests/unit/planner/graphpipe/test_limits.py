"""Few searches for the smallest bottleneck: what an answer says about other limits."""

from __future__ import annotations

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.planner import PlanRequest
from lightning_gpp.planner.graphpipe.choice import Divisions, choose
from lightning_gpp.planner.graphpipe.draft import UnitTables
from lightning_gpp.planner.graphpipe.judge import DraftJudge
from lightning_gpp.planner.graphpipe.partition import LimitedWays
from lightning_gpp.planner.graphpipe.space import Problem, Space

LAYER_S = 3.0 / 4
"""Forward and backward of a layer, per sample of a micro-batch of four."""


@pytest.fixture
def space() -> Space:
    """Twenty equal layers in a chain, for eight devices: three layers are the fewest."""
    graph = literal_graph({f"l{i}": f"l{i - 1}" if i else "x" for i in range(20)})
    costs = Costs((profile_of(graph, 1.0),))
    cluster = uniform_cluster(8, Link(1e30))
    request = PlanRequest(graph, cluster, costs, 64, 16, max_replicas=1)
    return Problem(UnitTables(request)).space(4)


def test_a_limit_without_divisions_rules_out_all_up_to_the_next_stage():
    """Layers of 3, 3, 2, 2, 2 and 3 seconds for three devices: a third would be 5, but 6 is least.

    l0 l1 | l2 l3 l4 | l5
    """
    times = [3.0, 3.0, 2.0, 2.0, 2.0, 3.0]
    graph = literal_graph({f"l{i}": f"l{i - 1}" if i else "x" for i in range(6)})
    costs = Costs((Profile({f"l{i}": OpProfile(t, 0.0) for i, t in enumerate(times)}, 1),))
    request = PlanRequest(graph, uniform_cluster(3, Link(1e30)), costs, 8, 8, max_replicas=1)
    divisions = Divisions(Problem(UnitTables(request)).space(1))
    assert divisions.low_s == pytest.approx(5)
    assert divisions.at(5.5) is None
    assert divisions.low_s == pytest.approx(6)
    found = divisions.at(6.5)
    assert found is not None and found.slowest_s == pytest.approx(6)


def test_more_units_than_stages_need_company(space):
    """Twenty layers on eight devices: three are together somewhere."""
    assert space.lower_bound_s == pytest.approx(3 * LAYER_S)


def test_divisions_answer_for_limits_down_to_their_slowest_stage(space, monkeypatch):
    divisions = Divisions(space)
    found = divisions.at(3.9 * LAYER_S)
    assert found is not None and found.slowest_s == pytest.approx(3 * LAYER_S)
    monkeypatch.setattr(LimitedWays, "ways", lambda self: pytest.fail("searched again"))
    assert divisions.at(3.1 * LAYER_S) is found


@pytest.mark.parametrize("at_most", [3.0, 3.5, 100.0])
def test_the_smallest_bottleneck_does_not_depend_on_where_the_search_begins(space, at_most):
    found = Divisions(space).smallest(at_most * LAYER_S * 1.000001)
    assert found is not None and found.seconds_per_sample == pytest.approx(3 * LAYER_S)


def test_larger_bottlenecks_are_of_no_interest(space):
    assert Divisions(space).smallest(2.99 * LAYER_S) is None


def test_a_larger_budget_never_gives_a_slower_plan():
    """What is looked at with little is the beginning of what is looked at with more."""
    operators = {f"b{b}.{i}": f"b{b}.{i - 1}" if i else "x" for b in range(3) for i in range(5)}
    graph = literal_graph(operators | {"end": "b0.4 b1.4 b2.4"})
    costs = Costs((profile_of(graph, {o.name: 1.0 + n % 4 for n, o in enumerate(graph)}),))
    request = PlanRequest(graph, uniform_cluster(6, Link(1e6)), costs, 64)
    steps_s = []
    for budget in (50, 100, 200, 500, 10_000):
        judge = DraftJudge(UnitTables(request), "graphpipe", budget)
        choose(Problem(judge.tables), judge)
        steps_s.append(judge.best_s)
    assert steps_s == sorted(steps_s, reverse=True)
    assert steps_s[-1] < steps_s[0]
