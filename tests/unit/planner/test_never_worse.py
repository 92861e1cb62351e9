"""``graphpipe`` beside the baselines on published models, where it once lost."""

from __future__ import annotations

import pytest
from helpers.published import shared_graph

from lightning_gpp.cluster import cluster_preset
from lightning_gpp.planner import PlanRequest, answer, evaluate_plan
from lightning_gpp.workloads import read_pipedream_profile


@pytest.mark.parametrize(
    ("name", "num_devices", "samples", "baseline"),
    [
        ("gnmt", 4, 128, "sequential"),  # many equally promising candidates
        ("vgg16", 4, 16, "pipedream"),  # replicas that take turns, at small micro-batches
        ("vgg16", 8, 4, "piper"),  # fewer stages that fill sooner, with the same bottleneck
        ("vgg16", 16, 16, "piper"),  # the same, and stages with micro-batches of other sizes
    ],
)
def test_no_baseline_is_faster(name, num_devices, samples, baseline):
    profiled = 32 if name == "gnmt" else 128
    workload = read_pipedream_profile(shared_graph(f"pipedream/{name}.txt"), samples=profiled)
    cluster = cluster_preset("summit", num_devices)
    size = num_devices * samples
    request = PlanRequest(workload.graph, cluster, workload.costs_for(cluster, size), size)
    ours_s, its_s = (
        evaluate_plan(answer(request, planner), request).step_s
        for planner in ("graphpipe", baseline)
    )
    assert ours_s <= its_s * (1 + 1e-9)
