"""Pipelines beside each other, as a planner sees them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.graphs import literal_graph

from lightning_gpp.cluster import Link, all_reduce_s, uniform_cluster
from lightning_gpp.cost import ANY_DEVICE, Costs, OpProfile, Profile
from lightning_gpp.planner import PLANNERS, evaluate_plan
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.side_by_side import pipeline_counts, pipeline_request, side_by_side

GRAPH = literal_graph({"stem": "x", "a": "stem", "b": "stem", "cat()": "a b", "head": "cat()"})
COSTS = Costs((Profile({op.name: OpProfile(1e-3, 2e-3) for op in GRAPH}, 1, ANY_DEVICE),))
CLUSTER = uniform_cluster(4, Link(bandwidth_bytes_per_s=1e6, latency_s=0.001))
REQUEST = PlanRequest(GRAPH, CLUSTER, COSTS, minibatch_size=12)


def test_counts_divide_devices_and_samples() -> None:
    assert pipeline_counts(REQUEST) == [1, 2, 4]
    assert pipeline_counts(replace(REQUEST, minibatch_size=6)) == [1, 2]
    assert pipeline_counts(replace(REQUEST, num_microbatches=5)) == [1, 2]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_they_do_together(count: int) -> None:
    """Each holds a part of the model on a device: the fullest part sets the average's pace."""
    asked = pipeline_request(REQUEST, count)
    assert (asked.num_devices, asked.minibatch_size) == (4 // count, 12 // count)
    pipeline = evaluate_plan(PLANNERS["balanced"](asked), asked)
    found = side_by_side(REQUEST, count, pipeline)
    most = max(
        REQUEST.tables.parameter_bytes(stage.operators).trained_bytes
        for stage in pipeline.plan.stages
    )
    assert most > 0
    ring = all_reduce_s(CLUSTER, range(count), most)
    assert found.average_s == pytest.approx(ring)
    assert found.step_s == pytest.approx(pipeline.step_s + ring)
    assert found.throughput == pytest.approx(12 / found.step_s)
