"""Ends of several branches in the stage with their join."""

from __future__ import annotations

from math import inf

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.cost import Costs
from lightning_gpp.planner import PlanRequest, answer, evaluate_plan
from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.layout import ElementRun
from lightning_gpp.planner.graphpipe.space.tails import (
    Beginnings,
    end_of,
    fewest_devices,
    sparing_size,
)

RUN = ElementRun(bounds=(3, 4, 5, 6, 7), blocks={}, kind=5)
BRANCHES = tuple(ElementRun(bounds=(place, place + 1), blocks={}, kind=7) for place in (4, 5, 6))
BLOCK = ElementRun(bounds=(3, 4, 7, 8), blocks={1: BRANCHES}, kind=6)


@pytest.mark.parametrize(
    ("needed", "size"),
    [
        ([0, 1, 1, 2, 2], 2),  # the first two elements need one device, all four need two
        ([0, 1, 1, 1, 2], 3),
        ([0, 2, 2, 2, 2], None),  # nothing is spared
        ([0, 1, 1, 1, 1], None),  # one device is the least
        ([0, inf, inf, inf, inf], None),
    ],
)
def test_the_longest_beginning_that_needs_fewer_devices(needed, size):
    assert sparing_size(needed) == size


ONE, TWO = Crew(1, 0, 1), Crew(2, 0, 1)


@pytest.mark.parametrize(
    ("run", "limit_s", "longest", "needed"),
    [
        (RUN, 2.0, 4, [0, 1, 1, 2, 2]),
        (RUN, 2.0, 1, [0, 1, 2, 3, 4]),  # a device has memory for one element only
        (RUN, 1.5, 4, [0, 1, 2, 3, 4]),
        (RUN, 0.75, 4, [0, 2, 4, 6, 8]),
        (RUN, 0.5, 4, [0, inf, inf, inf, inf]),
        (BLOCK, 1.0, 4, [0, 1, 4, 5]),  # three branches of one element each
        (BLOCK, 4.0, 4, [0, 1, 1, 2]),
    ],
)
def test_the_fewest_devices_of_beginnings(run, limit_s, longest, needed):
    least_seconds = {ONE: range(20), TWO: [0.75 * place for place in range(20)]}

    def fits(interval, crew):
        return interval[1] - interval[0] <= longest

    assert fewest_devices(run, limit_s, least_seconds, fits) == needed


def test_beginnings_of_runs_that_are_alike_are_alike():
    beginnings = Beginnings()
    other = ElementRun(bounds=(7, 8, 9, 10, 11), blocks={}, kind=5)
    one, two = beginnings.beginning(RUN, 3), beginnings.beginning(other, 3)
    assert (one.bounds, two.bounds) == ((3, 4, 5, 6), (7, 8, 9, 10))
    assert one.kind == two.kind != beginnings.beginning(RUN, 2).kind
    assert beginnings.beginning(RUN, 3) is one
    assert end_of(RUN, 3) == (6, 7)


def test_seven_branches_fill_eight_devices():
    """Seven times eight layers: seven on each device, if the join takes the last layers."""
    operators = {
        f"b{branch}.{layer}": f"b{branch}.{layer - 1}" if layer else "x"
        for branch in range(7)
        for layer in range(8)
    }
    graph = literal_graph(operators | {"join": " ".join(f"b{branch}.7" for branch in range(7))})
    profile = profile_of(graph, {o.name: 0.0 if o.name == "join" else 1.0 for o in graph})
    cluster = uniform_cluster(8, Link(1e30))
    request = PlanRequest(graph, cluster, Costs((profile,)), 64, 16, max_replicas=1)
    found = evaluate_plan(answer(request, "graphpipe_exclusive"), request)
    layer_s = 3.0 / 4  # forward and backward, per sample
    assert found.seconds_per_sample == pytest.approx(7 * layer_s)
    assert {len(stage.operators) for stage in found.plan.stages} == {7, 8}
