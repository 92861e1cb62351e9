"""Plans are simulated with the quantities by which planners judge them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.graphs import model_graphs, profiles
from helpers.plan_cases import is_valid, plans
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner import plan_request
from lightning_gpp.planner.evaluate import evaluate_plan
from lightning_gpp.planner.pipeline_run import pipeline_run
from lightning_gpp.schedule import SCHEDULES
from lightning_gpp.simulate import program_costs, simulate_plan

SLOW = Link(bandwidth_bytes_per_s=1e8, latency_s=1e-4)


@given(st.data(), st.sampled_from(sorted(SCHEDULES)), st.booleans())
def test_without_replicas_the_step_is_that_of_the_evaluation(data, schedule, is_chain):
    graph = without_feed_gradients(data.draw(model_graphs(with_state=False)))
    plan = data.draw(plans(graph, is_chain=is_chain))
    assume(is_valid(plan, graph))
    assert plan.num_microbatches is not None
    profile = data.draw(profiles(graph))
    request = plan_request(
        graph,
        uniform_cluster(plan.num_devices, SLOW, kind=profile.device),
        costs=profile,
        minibatch_size=4 * plan.num_microbatches,
        schedule=schedule,
    )
    costs = replace(program_costs(plan, request), buckets=())  # parameters that stages share
    found = simulate_plan(plan, request, costs)
    evaluation = evaluate_plan(plan, request)
    played = pipeline_run(plan, request).play(evaluation.stages)
    assert found.step_s == pytest.approx(played.step_s, rel=1e-9)
    for device in evaluation.devices:
        peak_bytes = max(size for _, size in found.device_memory[device.device])
        assert peak_bytes == pytest.approx(device.memory_bytes, abs=1)  # inputs kept are rounded


def without_feed_gradients(graph: ModelGraph) -> ModelGraph:
    """Planners leave the gradients that go back to the feed out of account."""
    return replace(graph, inputs=tuple(replace(i, requires_grad=False) for i in graph.inputs))
