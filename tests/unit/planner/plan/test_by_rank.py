"""Plans whose devices are ranks: another numbering, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Cluster, Device, Link, uniform_cluster
from lightning_gpp.cost import Costs
from lightning_gpp.planner import (
    Plan,
    PlanRequest,
    Stage,
    evaluate_plan,
    plan_request,
    validate_plan,
)
from lightning_gpp.planner.plan.by_rank import (
    by_rank,
    note_of_ranks,
    with_devices_of,
    with_loss_on,
)

GRAPH = literal_graph({"a": "x", "b": "x", "cat()": "a b"})
SPEEDS = {"fast": 1e-3, "slow": 3e-3}
"""Seconds of every operator."""


def question() -> PlanRequest:
    """Four devices in two hosts."""
    devices = tuple(Device(str(i), host=f"host{i // 2}", memory_bytes=1000 + i) for i in range(4))
    cluster = Cluster(devices, Link(1e9), Link(1e6))
    return plan_request(
        GRAPH, cluster, costs=profile_of(GRAPH), minibatch_size=12, num_microbatches=3
    )


def test_a_plan_that_was_written_down_runs_on_the_devices_that_it_was_made_for() -> None:
    """A planner's devices are ranks; a chain by hand ends on the last one, which is rank 0."""
    request = question()
    chain = tuple(Stage(i, (name,), (i + 1,)) for i, name in enumerate(("a", "b", "cat")))
    planned = Plan(chain, num_microbatches=3)
    written, by_ranks = by_rank(planned, request)
    assert with_devices_of(written, request) == by_ranks
    assert with_devices_of(planned, request) == request


def test_a_plan_by_hand_says_which_device_is_which_rank() -> None:
    stage = Stage(0, ("a", "b", "cat"), (1,))
    assert note_of_ranks(Plan((replace(stage, devices=(0,)),)), 3) == ()
    (note,) = note_of_ranks(Plan((stage,)), 3)
    assert note.endswith("0 is rank 1, 1 is rank 0, 2 is rank 2.")


def test_the_loss_goes_to_rank_0_where_that_costs_nothing() -> None:
    """The last stage has replicas, of which each takes samples of one of the stage before."""
    request = replace(question(), cluster=uniform_cluster(4, Link(1e6)))
    stages = Stage(0, ("a", "b"), (0, 2), 2), Stage(1, ("cat",), (1, 3), 2)
    plan = Plan(stages, num_microbatches=6)
    moved = with_loss_on(plan, 3, request)
    assert [stage.devices for stage in moved.stages] == [(0, 2), (3, 1)]
    by_ranks, renumbered = by_rank(moved, request)
    assert evaluate_plan(by_ranks, renumbered).step_s == evaluate_plan(plan, request).step_s


def test_rank_0_stays_the_device_that_it_is_where_devices_differ() -> None:
    """It is slow, and the planner's last stage is on a fast device: outputs are sent to rank 0."""
    devices = (Device("fast", "fast"), Device("rank 0", "slow"))
    costs = Costs(tuple(replace(profile_of(GRAPH, s), device=d) for d, s in SPEEDS.items()))
    asked = replace(question(), cluster=Cluster(devices, Link(1e9)), costs=costs)
    plan = Plan((Stage(0, ("a",), (1,)), Stage(1, ("b", "cat"), (0,))), num_microbatches=3)
    moved, by_ranks = by_rank(with_loss_on(plan, 1, asked), asked)
    assert [device.name for device in by_ranks.cluster.devices] == ["rank 0", "fast"]
    assert moved.loss_device == 0
    assert [stage.devices for stage in moved.stages] == [(0,), (1,)]
    exchanged = replace(
        moved, loss_device=None, stages=(Stage(0, ("a",), (1,)), Stage(1, ("b", "cat"), (0,)))
    )
    assert evaluate_plan(moved, by_ranks).step_s < evaluate_plan(exchanged, by_ranks).step_s
    with pytest.raises(ValueError, match="the loss is on device 3, but there are 2 devices"):
        validate_plan(replace(moved, loss_device=3), GRAPH, 2)
