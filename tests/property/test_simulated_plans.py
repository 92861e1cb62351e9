"""Plans are simulated with the quantities by which planners judge them."""

from __future__ import annotations

import pytest
from helpers.graphs import model_graphs
from helpers.plan_cases import questions
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.planner.step_time.evaluate import evaluate_plan
from lightning_gpp.planner.step_time.pipeline_run import PipelineRun
from lightning_gpp.schedule import SCHEDULES
from lightning_gpp.simulate import simulate_plan


@given(st.data(), st.sampled_from(sorted(SCHEDULES)), st.booleans())
def test_without_replicas_the_step_is_that_of_the_evaluation(data, schedule, is_chain):
    graph = data.draw(model_graphs(with_state=False))
    plan, request = data.draw(questions(graph, schedule, is_chain=is_chain))
    found = simulate_plan(plan, request)
    evaluation = evaluate_plan(plan, request)
    step_s = PipelineRun(plan, request).step_s()
    assert found.step_s == pytest.approx(step_s, rel=1e-9)
    for device in evaluation.devices:
        peak_bytes = max(size for _, size in found.device_memory[device.device])
        assert peak_bytes == pytest.approx(device.memory_bytes, abs=1)  # inputs kept are rounded
