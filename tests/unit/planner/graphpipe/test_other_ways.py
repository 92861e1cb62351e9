"""Ways to plans that the climb from divisions of a line does not find."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.cluster import cluster_preset
from lightning_gpp.planner import plan_request
from lightning_gpp.planner.graphpipe.planner import exclusive_plans, other_ways
from lightning_gpp.workloads import dlrm


def test_branches_are_exchanged_where_memory_leaves_room_for_neither():
    workload, cluster = dlrm(), cluster_preset("summit", 8)
    devices = tuple(replace(one, memory_bytes=6 * 10**9) for one in cluster.devices)
    cluster, size = replace(cluster, devices=devices), workload.samples_per_device * 8
    costs = workload.costs_for(cluster, size)
    request = plan_request(
        workload.graph, cluster, minibatch_size=size, costs=costs, schedule="1f1b"
    )
    judge = exclusive_plans(request, "graphpipe")

    (exchange,) = other_ways(judge)  # all branches in one stage do not fit

    assert exchange.best.step_s < 0.95 * judge.best_s
