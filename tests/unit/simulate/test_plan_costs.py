"""What plans cost, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Cluster, Device, Link, uniform_cluster
from lightning_gpp.cost import Costs
from lightning_gpp.graph import FEED, ModelGraph
from lightning_gpp.planner import Plan, PlanRequest, Stage
from lightning_gpp.planner.step_time.gradients import stage_gradients
from lightning_gpp.simulate import (
    Bucket,
    MessageBytes,
    SpanKind,
    StageCosts,
    program_costs,
    simulate_plan,
)

#   x ──▶ a ──▶ b ──▶ c     1 s forward, 2 s backward, 1000 bytes of parameters each; 4 samples in a
#                           smallest micro-batch, 64 bytes per sample between operators
CHAIN = literal_graph({"a": "x", "b": "a", "c": "b"})


def question(graph: ModelGraph = CHAIN, **changes: Any) -> PlanRequest:
    costs = Costs((profile_of(graph, 1.0),))
    arguments: dict[str, Any] = {"cluster": uniform_cluster(3, Link(1000.0), kind="cpu")} | changes
    return PlanRequest(graph, costs=arguments.pop("costs", costs), minibatch_size=16, **arguments)


def replicated(**changes: Any) -> Plan:
    stage = Stage(0, ("a", "b", "c"), (0, 1), microbatch_multiple=2, **changes)
    return Plan((stage,), num_microbatches=4)


def parts(graph: ModelGraph = CHAIN, **changes: Any) -> list[tuple[float, float]]:
    """Bytes of every parameter, and the part of the backward after which its gradient is final."""
    (stage,) = replicated(**changes).stages
    names = [one.name for one in graph.parameters]
    found = stage_gradients(question(graph), stage, unit_size=4, parameters=names)
    return [(piece.size_bytes, found.part(piece)) for piece in found.pieces]


def test_gradients_come_from_the_last_operator_to_the_first() -> None:
    (found,) = program_costs(replicated(), question()).buckets
    assert found == Bucket(0, 3000, 1.0)
    assert parts() == [(1000, pytest.approx(n / 3)) for n in (1, 2, 3)]


def test_recomputation_comes_before_the_gradients() -> None:
    assert [part for _, part in parts(recompute=True)] == pytest.approx([5 / 9, 7 / 9, 1])


def test_a_parameter_of_two_operators_is_final_after_the_first_of_them() -> None:
    graph = literal_graph({"a": "x", "b": "a", "c": "b"}, parameters={"a": ["w"], "c": ["w"]})
    assert parts(graph) == [(1000, pytest.approx(2 / 3)), (1000, 1.0)]


def test_every_replica_computes_at_the_pace_of_its_own_device() -> None:
    fast, slow = (replace(profile_of(CHAIN, s), device=k) for s, k in ((1.0, "cpu"), (3.0, "old")))
    cluster = Cluster((Device("new"), Device("old", "old")), Link(1000.0))
    request = question(cluster=cluster, costs=Costs((fast, slow)))
    found = program_costs(replicated(), request)
    assert [(stage.forward_s, stage.backward_s) for stage in found.stages] == [
        (3.0, 6.0), (9.0, 18.0), (0.0, 0.0)
    ]  # fmt: skip
    # the slower one decides: two micro-batches, 54 s, the message to the loss and back (0.256 s
    # each, one on its way while the other one computes), and a sum of 3000 bytes: 2 rounds of 1.5 s
    simulated = simulate_plan(replicated(), request)
    backwards = [t for t in simulated.tasks if t.kind is SpanKind.BACKWARD and t.device == 1]
    assert simulated.step_s == backwards[-1].end_s + 3.0


TWO_STAGES = Plan(
    (
        Stage(0, ("a",), (0, 1), microbatch_multiple=2, recompute=True),
        Stage(1, ("b", "c"), (2,), microbatch_multiple=4),
    ),
    num_microbatches=4,
)


def test_stages_and_messages() -> None:
    found = program_costs(TWO_STAGES, question())
    # the first stage: 4 samples a replica; keeps its input of 256 bytes, needs 100 to work
    first = StageCosts(1.0, 3.0, 4000, 256.0, 100)
    # the second one: 16 samples, four times the seconds and bytes
    # and where it runs, the user's step: the batch, outputs and gradients of 4 samples
    step_bytes = 64 * 16 + 2 * 64 * 4
    assert found.stages == (first, first, StageCosts(8.0, 16.0, 8000 + step_bytes, 800, 0.0))
    size = MessageBytes(per_unit=256.0)
    assert found.forward_bytes == {(FEED, 0): size, (FEED, 1): size, (0, 2): size, (1, 2): size}
    assert found.backward_bytes == {(0, 2): size, (1, 2): size}


def test_what_does_not_grow_with_the_samples_is_in_every_message() -> None:
    graph = literal_graph({"a": "x", "b": "a", "c": "b"}, unbatched=["a"])
    plan = Plan((Stage(0, ("a",), (0,)), Stage(1, ("b", "c"), (1,))), num_microbatches=4)
    found = program_costs(plan, question(graph))
    assert found.forward_bytes[0, 1] == MessageBytes(per_unit=0.0, fixed=256.0)
