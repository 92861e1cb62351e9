"""Few searches for the smallest bottleneck: what an answer says about other limits."""

from __future__ import annotations

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.cost import Costs
from lightning_gpp.planner import PlanRequest
from lightning_gpp.planner.graphpipe.limits import Divisions
from lightning_gpp.planner.graphpipe.partition import Partition
from lightning_gpp.planner.graphpipe.problem import branching, search_units
from lightning_gpp.planner.graphpipe.space import Space

LAYER_S = 3.0 / 4
"""Forward and backward of a layer, per sample of a micro-batch of four."""


@pytest.fixture
def space() -> Space:
    """Twenty equal layers in a chain, for eight devices: three layers are the fewest."""
    graph = literal_graph({f"l{i}": f"l{i - 1}" if i else "x" for i in range(20)})
    costs = Costs((profile_of(graph, 1.0),))
    cluster = uniform_cluster(8, Link(1e30))
    request = PlanRequest(graph, cluster, costs, 64, 16, max_replicas=1)
    return branching(request, search_units(request)).space(4)


def test_a_limit_without_divisions_rules_out_all_up_to_the_next_stage(space):
    divisions = Divisions(space)
    assert divisions.low_s == pytest.approx(20 / 8 * LAYER_S)
    assert divisions.at(2.6 * LAYER_S) is None
    assert divisions.low_s == pytest.approx(3 * LAYER_S)


def test_divisions_answer_for_limits_down_to_their_slowest_stage(space, monkeypatch):
    divisions = Divisions(space)
    found = divisions.at(3.9 * LAYER_S)
    assert found is not None and found.slowest_s == pytest.approx(3 * LAYER_S)
    monkeypatch.setattr(Partition, "ways", lambda self: pytest.fail("searched again"))
    assert divisions.at(3.1 * LAYER_S) is found


@pytest.mark.parametrize("guess", [0.5, 1.0, 1.2, 3.0, 100.0])
@pytest.mark.parametrize("at_most", [3.0, 3.5, 100.0])
def test_the_smallest_bottleneck_does_not_depend_on_the_guess(space, guess, at_most):
    found = Divisions(space).with_smallest_bottleneck(at_most * LAYER_S * 1.000001, guess=guess)
    assert found is not None and found.seconds_per_sample == pytest.approx(3 * LAYER_S)


def test_larger_bottlenecks_are_of_no_interest(space):
    assert Divisions(space).with_smallest_bottleneck(2.99 * LAYER_S) is None
