from __future__ import annotations

import pytest
from helpers.graphs import literal_graph, profile_of, value

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.graph import GraphInput, ModelGraph
from lightning_gpp.planner import Plan, PlanRequest, Stage, answer, num_devices_used
from lightning_gpp.planner.plan_to_run import on_all_devices

CHAIN = literal_graph({"a": "x", "b": "a", "c": "b"})
SLOW = Link(bandwidth_bytes_per_s=1e3)  # any message takes longer than all the work
WHOLE = Plan((Stage(0, ("a", "b", "c"), (0,)),), num_microbatches=1)


def request(num_devices: int, memory_bytes: int | None = None, graph=CHAIN) -> PlanRequest:
    devices = tuple(Device(f"{i}", memory_bytes=memory_bytes) for i in range(num_devices))
    return PlanRequest(graph, Cluster(devices, SLOW), Costs((profile_of(graph),)), 8)


def test_a_plan_on_fewer_devices_gives_way():
    question = request(2)
    alone = answer(question, "graphpipe")
    assert num_devices_used(alone) == 1  # the fastest
    both = on_all_devices(alone, question)
    assert num_devices_used(both) == 2


def test_a_plan_on_all_devices_stays():
    plan = Plan((Stage(0, ("a", "b"), (1,)), Stage(1, ("c",), (0,))), num_microbatches=2)
    assert on_all_devices(plan, request(2)) is plan
    replicas = Plan((Stage(0, ("a", "b", "c"), (0, 1), 2),), num_microbatches=2)
    assert on_all_devices(replicas, request(2)) is replicas


def test_a_model_of_few_operators_leaves_devices_idle():
    assert num_devices_used(on_all_devices(WHOLE, request(5))) == 3
    single = literal_graph({"a": "x"})
    only = Plan((Stage(0, ("a",), (0,)),), num_microbatches=1)
    assert on_all_devices(only, request(4, graph=single)) is only


def test_what_does_not_fit_into_memory_is_not_taken():
    assert on_all_devices(WHOLE, request(2, memory_bytes=10)) is WHOLE


def test_the_number_of_microbatches_stays_where_it_is_fixed():
    costs = Costs((profile_of(CHAIN),))
    devices = Cluster((Device("0"), Device("1")), SLOW)
    fixed = PlanRequest(CHAIN, devices, costs, 8, num_microbatches=4)
    assert on_all_devices(WHOLE, fixed).num_microbatches == 4


@pytest.mark.parametrize(
    ("minibatch_size", "sizes"),
    [
        (8, [1, 2, 4, 8]),
        (48, [1, 2, 4, 8, 16, 48]),
        (50, [50 / 32, 3.125, 6.25, 12.5, 25, 50]),
        (7, [1.75, 3.5, 7]),
        (1, [1]),
    ],
)
def test_microbatch_sizes_of_a_minibatch(minibatch_size, sizes):
    costs = Costs((Profile({n: OpProfile(1.0) for n in "abc"}, 4),))
    found = PlanRequest(CHAIN, Cluster((Device("0"),)), costs, minibatch_size).microbatch_sizes
    assert list(found) == sizes


@pytest.mark.parametrize("planner", ["graphpipe", "sequential", "pipedream", "piper"])
def test_what_cannot_be_cut_by_samples_is_not_replicated(planner):
    """A heavy operator on a free link begs for replicas, but its result is one for all samples."""
    free = Link(bandwidth_bytes_per_s=1e15)
    cluster = Cluster((Device("0"), Device("1")), free)
    for unbatched, num_replicas in ([], 2), (["heavy"], 1):
        graph = literal_graph({"h": "x", "heavy": "h"}, unbatched=unbatched)
        costs = Costs((profile_of(graph, {"h": 1e-9, "heavy": 1e-2}),))
        plan = answer(PlanRequest(graph, cluster, costs, 8), planner)  # it is validated
        home = next(stage for stage in plan.stages if "heavy" in stage.operators)
        assert home.num_replicas == num_replicas


def test_a_model_of_uncuttable_inputs_has_no_replicas():
    graph = literal_graph({"a": "x"}, unbatched=["x", "a"])
    inputs = tuple(GraphInput(value("x", batch_dim=None)) for _ in "x")
    graph = ModelGraph(inputs, graph.operators, graph.outputs, graph.parameters)
    question = PlanRequest(
        graph, Cluster((Device("0"), Device("1"))), Costs((profile_of(graph),)), 8
    )
    assert question.replica_counts(8) == (1,)
    assert request(2).replica_counts(8) == (1, 2, 4, 8)
