"""Lower bounds of a step beside the step that the judge plays."""

from __future__ import annotations

import math

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Link, cluster_preset, uniform_cluster
from lightning_gpp.planner import PlanRequest
from lightning_gpp.planner.graphpipe.candidates.chains import Chains, ChainStage, Hop
from lightning_gpp.planner.graphpipe.choose.least import LeastSteps
from lightning_gpp.planner.graphpipe.choose.look import Look
from lightning_gpp.planner.graphpipe.problem import branching, search_units
from lightning_gpp.planner.make_plan import plan_request


def stage(count: int, in_flight: int, *hops: Hop, reduce_s: float = 0.0) -> ChainStage:
    """A second forward, two back, micro-batches of one unit."""
    return ChainStage(1, count, in_flight, 1, 1.0, 2.0, reduce_s, 0.0, 0.0, 0.0, hops)


def hop(target: int, message_s: float) -> Hop:
    return Hop(target, message_s, message_s, message_back_s=message_s)


def test_a_line_fills_and_drains() -> None:
    """Four micro-batches through two stages, messages free.

    0: F F B . F B F B B     until 0, 15 seconds
    1:   F B F B F B F B
    """
    stages = [stage(4, 2, hop(1, 0.0)), stage(4, 1)]
    assert Chains(stages).least_step_s() == 15


def test_a_message_on_the_way_there_and_back_is_a_loop() -> None:
    """Two stages with one micro-batch more in flight before: a loop of 8 seconds for every two."""
    stages = [stage(20, 2, hop(1, 1.0)), stage(20, 1)]
    assert Chains(stages).least_step_s() > 20 * 4  # 3 of work and 1 of a message
    assert Chains([stage(20, 2, hop(1, 0.0)), stage(20, 1)]).least_step_s() == 63


def test_a_sum_of_gradients_behind_the_slowest_stage_comes_last() -> None:
    stages = [stage(4, 2, hop(1, 0.0)), stage(4, 1, reduce_s=100.0)]
    assert Chains(stages).least_step_s() == 1 + 4 * 3 + 100


def test_no_more_is_found_than_is_of_interest() -> None:
    stages = [stage(20, 2, hop(1, 1.0)), stage(20, 1)]
    at_least_s = Chains(stages).least_step_s(enough_s=60)
    assert 60 <= at_least_s < Chains(stages).least_step_s()


CHAIN = dict(zip("abcdefgh", "xabcdefg"))
DIAMOND = {"a": "x", "b": "a", "c": "b", "d": "a", "e": "d", "f": "c e", "g": "f"}
TOWERS = {"a": "x", "b": "a", "c": "x", "d": "c", "e": "x", "f": "b d e", "g": "f"}


@pytest.mark.parametrize("operators", [CHAIN, DIAMOND, TOWERS])
@pytest.mark.parametrize("bandwidth", [1e6, 1e9])
@pytest.mark.parametrize("take_turns", [False, True])
def test_bounds_are_within_a_tenth_of_the_step(operators, bandwidth, take_turns) -> None:
    """Half of them within three hundredths."""
    graph = literal_graph(operators)
    request = plan_request(
        graph,
        uniform_cluster(6, Link(bandwidth, 1e-5)),
        minibatch_size=64,
        costs=profile_of(graph, 1.0),
    )
    ratios = sorted(_ratios(request, take_turns=take_turns))
    assert ratios[0] > 0.9 and ratios[-1] <= 1 + 1e-9
    assert ratios[len(ratios) // 2] > 0.97


def _ratios(request: PlanRequest, *, take_turns: bool) -> list[float]:
    """Bounds over steps of what is found at two micro-batch sizes."""
    problem = branching(request, search_units(request))
    ratios: list[float] = []

    def consider(some) -> float:
        ratios.extend(one.least_s / one.evaluation().step_s for one in some)
        return math.inf

    for size in request.microbatch_sizes[:2]:
        space = problem.space(size, take_turns=take_turns)
        Look(problem, space, "graphpipe", consider, LeastSteps(), is_chain=False).run()
    return ratios


def test_links_of_hosts_are_told_apart() -> None:
    """A plan over two hosts is judged with the links that its messages take."""
    graph = literal_graph(CHAIN)
    cluster = cluster_preset("summit", 8)
    request = plan_request(graph, cluster, minibatch_size=64, costs=profile_of(graph, 1e-5))
    assert sorted(_ratios(request, take_turns=False))[0] > 0.9
