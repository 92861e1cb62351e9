from __future__ import annotations

import pytest
from helpers.graphs import literal_graph, profile_of
from helpers.planning import evaluated

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.planner import Plan, Stage

CHAIN = literal_graph({"a": "x", "b": "a"})
TENSOR_BYTES = 4 * 16 * 4
FREE = Link(1e30)


def test_one_device_takes_the_sum():
    plan = Plan((Stage(0, ("a", "b"), (0,)),))
    run = evaluated(plan, CHAIN, profile=profile_of(CHAIN, 1.0), num_microbatches=4)
    assert run.step_s == 4 * 2 * 3.0
    assert [stage.in_flight for stage in run.stages] == [1]


def test_two_stages_overlap():
    """Stage 0: F0 F1 .. B0 .. B1; stage 1 is busy from 1 to 7 (unit times, m = 2)."""
    plan = Plan((Stage(0, ("a",), (0,)), Stage(1, ("b",), (1,))))
    run = evaluated(
        plan,
        CHAIN,
        profile=profile_of(CHAIN, 1.0),
        num_microbatches=2,
        cluster=uniform_cluster(2, FREE),
    )
    assert run.step_s == pytest.approx(1 + 2 * 3 + 2)
    assert [device.busy_s for device in run.devices] == [6.0, 6.0]
    assert [stage.in_flight for stage in run.stages] == [2, 1]


def test_messages_take_size_over_bandwidth_each_way():
    plan = Plan((Stage(0, ("a",), (0,)), Stage(1, ("b",), (1,))))
    link = Link(TENSOR_BYTES / 0.5, latency_s=0.25)  # 0.75 s per message
    run = evaluated(
        plan,
        CHAIN,
        profile=profile_of(CHAIN, 1.0),
        num_microbatches=1,
        cluster=uniform_cluster(2, link),
    )
    # the feed to stage 0, forward, message, forward and backward, gradient, backward
    assert run.step_s == pytest.approx(0.75 + 1 + 0.75 + 3 + 0.75 + 2)


def test_a_multiple_takes_longer_and_comes_less_often():
    plan = Plan((Stage(0, ("a",), (0,), 2), Stage(1, ("b",), (1,), 2)))
    run = evaluated(plan, CHAIN, profile=profile_of(CHAIN, 1.0), num_microbatches=4)
    assert [device.busy_s for device in run.devices] == [12.0, 12.0]
    assert [stage.microbatch_size for stage in run.stages] == [8.0, 8.0]  # 2 halves
