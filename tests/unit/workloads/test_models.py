"""The models of the GraphPipe paper, against its sizes (papers: arXiv 2406.17145, appendix A.2)."""

from __future__ import annotations

import pytest

from lightning_gpp.cluster import cluster_preset
from lightning_gpp.planner import make_plan
from lightning_gpp.workloads import WORKLOADS, candle_uno, dlrm, mmt


def parameters(workload) -> float:
    return sum(parameter.size_bytes for parameter in workload.graph.parameters) / 4


def forward_flops(workload) -> float:
    return sum(work.flops.at(1) for work in workload.costs.values())


def test_mmt():
    #  tokens0 ─> (attention ─> linear1 ─> linear2) x 8 ─┬─> concat
    #  tokens3 ─> …                                      ─┘
    workload = mmt()
    graph = workload.graph
    assert len(graph) == 4 * 8 * 3 + 1
    assert graph.predecessors["concat"] == tuple(f"branches_{i}_layers_7_linear2" for i in range(4))
    assert graph.values["concat_out"].tensors[0].shape == (1, 256, 4 * 1024)
    assert parameters(workload) == pytest.approx(32 * 12 * 1024**2, rel=0.01)
    # Two operations per parameter and token, and the scores.
    expected = 2 * 256 * 32 * 12 * 1024**2 + 32 * 4 * 256**2 * 1024
    assert forward_flops(workload) == pytest.approx(expected, rel=1e-6)


def test_dlrm():
    workload = dlrm()
    graph = workload.graph
    assert len(graph) == 7 * 4 + 7 + 1 + 5
    assert graph.values["concat_out"].tensors[0].shape == (1, 7 * 4096 + 7 * 100 * 64)
    assert graph.parameter["sparse.0.weight"].size_bytes == 1_000_000 * 64 * 4
    assert workload.costs["sparse_0"].moved_bytes.fixed == 0  # a bag, not the table
    assert parameters(workload) == pytest.approx(
        7e6 * 64  # tables
        + 7 * (2048 * 4096 + 3 * 4096**2)  # dense branches
        + (7 * 4096 + 7 * 6400) * 4096
        + 3 * 4096**2
        + 4096,  # common part
        rel=0.001,
    )


def test_candle_uno():
    workload = candle_uno()
    assert len(workload.graph) == 7 * 4 + 2
    assert len(workload.graph.inputs) == 7
    widths = 1 + 1 + 942 + 2 * 5270 + 2 * 2048
    expected = 4096 * widths + 21 * 4096**2 + 7 * 4096
    assert parameters(workload) == pytest.approx(expected, rel=0.001)
    assert len(candle_uno(num_branches=16).graph) == 16 * 4 + 2


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_costs_on_a_cluster(name):
    workload = WORKLOADS[name]()
    cluster = cluster_preset("summit", num_devices=4)
    costs = workload.costs_for(cluster)
    (kind,) = cluster.kinds
    sizes = [profile.microbatch_size for profile in costs.profiles]
    assert sizes[0] == 1
    assert sizes[-1] <= workload.minibatch_size(4) < 2 * sizes[-1]  # the largest power of two
    seconds = [
        sum(cost.forward_s + cost.backward_s for cost in costs.at(size, kind).operators.values())
        for size in sizes
    ]
    per_sample = [total / size for total, size in zip(seconds, sizes)]
    assert per_sample == sorted(per_sample, reverse=True)  # small micro-batches cost more
    peak = {"mmt": 125e12, "transformer": 125e12}.get(name, 15.7e12)
    assert seconds[-1] * peak > 3 * forward_flops(workload) * sizes[-1]  # no faster than the sheet
    make_plan(
        workload.graph,
        cluster,
        planner="balanced",
        costs=costs,
        minibatch_size=workload.minibatch_size(4),
    )
