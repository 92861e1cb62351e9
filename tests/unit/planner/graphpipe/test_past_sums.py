"""Plans behind a hill of sums: more replicas of a layer that are better after other moves only."""

from __future__ import annotations

import pytest

from lightning_gpp.cluster import cluster_preset
from lightning_gpp.planner import evaluate_plan, plan_request
from lightning_gpp.planner.graphpipe.planner import climb_past_sums, exclusive_plans
from lightning_gpp.workloads import dlrm


def test_shorter_sums_lead_to_a_plan_that_is_shorter_with_the_true_ones():
    workload, cluster = dlrm(), cluster_preset("summit", 16)
    size = workload.samples_per_device * cluster.num_devices
    costs = workload.costs_for(cluster, size)
    request = plan_request(workload.graph, cluster, minibatch_size=size, costs=costs)
    judge = exclusive_plans(request, "graphpipe")
    before_s = judge.best_s

    climb_past_sums(judge)

    assert judge.best.step_s < 0.98 * before_s
    assert judge.best.step_s == pytest.approx(evaluate_plan(judge.best.plan, request).step_s)
