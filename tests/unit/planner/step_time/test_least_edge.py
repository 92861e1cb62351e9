"""A lower bound of a step where the messages of one device take longest."""

from __future__ import annotations

import pytest
from helpers.graphs import literal_graph, profile_of
from helpers.plan_bounds import least_step_s

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.cost import Costs
from lightning_gpp.planner import Plan, PlanRequest, Stage, plan_request
from lightning_gpp.planner.step_time.evaluate import evaluate_plan

MESSAGE_S = 100.0
"""Far longer than any work."""


def question() -> PlanRequest:
    """Two operators on eight devices, with messages that take :data:`MESSAGE_S` at least."""
    graph = literal_graph({"a": "x", "b": "a"})
    return plan_request(
        graph,
        uniform_cluster(8, Link(1e30, MESSAGE_S)),
        minibatch_size=16,
        costs=Costs((profile_of(graph),)),
    )


@pytest.mark.parametrize("replicas", [2, 4])
def test_what_the_device_of_the_loss_sends_is_most_of_the_step(replicas):
    """It feeds all other replicas and sends them their gradients, one after the other."""
    request = question()
    plan = Plan((Stage(0, ("a", "b"), tuple(range(replicas)), replicas),), "by hand", 16)
    step_s = evaluate_plan(plan, request).step_s
    least_s = least_step_s(plan, request)
    assert least_s >= 16 * (replicas - 1) / replicas * MESSAGE_S
    assert step_s / 2 <= least_s <= step_s


def test_a_device_that_sends_to_replicas_waits_for_its_port():
    """Activations to four replicas leave one after the other, and so do their gradients later."""
    request = question()
    stages = Stage(0, ("a",), (0,), 4), Stage(1, ("b",), (1, 2, 3, 4), 4)
    plan = Plan(stages, "by hand", 16)
    assert least_step_s(plan, request) >= 16 * MESSAGE_S
    assert least_step_s(plan, request) <= evaluate_plan(plan, request).step_s
