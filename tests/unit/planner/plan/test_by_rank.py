"""Plans whose devices are ranks: another numbering, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Cluster, Device, Link, uniform_cluster
from lightning_gpp.planner import Plan, PlanRequest, Stage, evaluate_plan, plan_request
from lightning_gpp.planner.plan.by_rank import (
    by_rank,
    note_of_ranks,
    with_devices_of,
    with_loss_on,
)

GRAPH = literal_graph({"a": "x", "b": "x", "cat()": "a b"})


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
