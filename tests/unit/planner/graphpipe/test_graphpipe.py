from __future__ import annotations

import dataclasses

import pytest
from helpers.graphs import literal_graph

from lightning_gpp.cluster import Cluster, Device, Link, uniform_cluster
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner import make_plan
from lightning_gpp.planner.make_plan import PLANNERS, plan_request
from lightning_gpp.planner.step_time.evaluate import evaluate_plan

FREE = Link(bandwidth_bytes_per_s=1e15)


def branches(num_branches: int, length: int) -> ModelGraph:
    """Chains from the input, joined at the end.

    x ─┬─> b0.0 ─> … ─┬─> cat
       └─> b1.0 ─> … ─┘
    """
    operators = {
        f"b{branch}.{i}": f"b{branch}.{i - 1}" if i else "x"
        for branch in range(num_branches)
        for i in range(length)
    }
    ends = " ".join(f"b{branch}.{length - 1}" for branch in range(num_branches))
    return literal_graph(operators | {"cat()": ends})


def fixed_costs(graph: ModelGraph, *, activation_bytes: int = 0) -> Costs:
    """A second per module at any size, so that replicas gain nothing; functions are free."""
    return Costs(
        tuple(
            Profile(
                {o.name: OpProfile(1.0 if o.scope else 0.0, 0.0, activation_bytes) for o in graph},
                size,
            )
            for size in (1, 2, 4)
        )
    )


def test_a_join_needs_no_stage_of_its_own():
    """The layers of the branches fill all devices, and the last of one also concatenates."""
    graph = branches(num_branches=4, length=8)
    request = plan_request(
        graph,
        uniform_cluster(32, FREE),
        minibatch_size=4,
        num_microbatches=4,
        costs=fixed_costs(graph),
    )
    best = evaluate_plan(PLANNERS["graphpipe_exclusive"](request), request)
    assert len(best.stages) == 32
    assert best.stages[-1].stage.operators[-1] == "cat"
    assert len(best.stages[-1].stage.operators) == 2
    assert best.depth == 9  # the other branches wait for the stage with the join


def test_whole_branches_share_a_device():
    graph = branches(num_branches=4, length=3)
    plan = make_plan(
        graph,
        uniform_cluster(2, FREE),
        minibatch_size=8,
        num_microbatches=8,
        planner="graphpipe_exclusive",
        costs=fixed_costs(graph),
    )
    assert [len(stage.operators) for stage in plan.stages] == [6, 7]
    assert len({name.split("_")[0] for name in plan.stages[0].operators}) == 2


def test_branches_run_in_parallel_and_in_sequential_they_do_not():
    graph = branches(num_branches=4, length=2)
    options = {"minibatch_size": 8, "num_microbatches": 8, "costs": fixed_costs(graph)}
    request = plan_request(graph, uniform_cluster(8, FREE), **options)
    graph_plan, chain = (PLANNERS[name](request) for name in ("graphpipe_exclusive", "sequential"))
    assert evaluate_plan(graph_plan, request).depth == 3
    assert evaluate_plan(chain, request).depth > 3
    assert chain.is_chain and not graph_plan.is_chain
    assert evaluate_plan(graph_plan, request).step_s < evaluate_plan(chain, request).step_s


def test_slow_devices_get_less_work():
    graph = literal_graph(dict(zip("abcdef", "xabcde")))
    fast = fixed_costs(graph).profiles[0]
    slow = Profile(
        {name: OpProfile(2.0, 0.0) for name in fast.operators}, fast.microbatch_size, "slow"
    )
    costs = Costs((dataclasses.replace(fast, device="fast"), slow))
    devices = (Device("0", "slow"), Device("1", "fast"))
    plan = make_plan(
        graph,
        Cluster(devices, FREE),
        minibatch_size=32,
        num_microbatches=32,
        planner="graphpipe_exclusive",
        costs=costs,
    )
    work = {plan.stages[i].devices[0]: len(plan.stages[i].operators) for i in range(2)}
    assert work == {0: 2, 1: 4}


def test_recomputation_only_where_memory_asks_for_it():
    graph = literal_graph(dict(zip("abcd", "xabc")))
    costs = fixed_costs(graph, activation_bytes=1000)
    options = {"minibatch_size": 4, "num_microbatches": 4, "costs": costs, "may_recompute": True}

    def plan(memory_bytes: int):
        devices = tuple(Device(str(i), memory_bytes=memory_bytes) for i in range(2))
        request = plan_request(graph, Cluster(devices, FREE), **options)
        found = PLANNERS["graphpipe"](request)
        assert evaluate_plan(found, request).is_feasible
        return found

    assert not any(stage.recompute for stage in plan(1_000_000).stages)
    assert any(stage.recompute for stage in plan(11_000).stages)


def test_what_may_make_a_problem_feasible():
    graph = literal_graph(dict(zip("abcd", "xabc")))
    devices = tuple(Device(str(i), memory_bytes=7_000) for i in range(2))
    costs = fixed_costs(graph)
    with pytest.raises(ValueError, match="no division of the model") as error:
        make_plan(graph, Cluster(devices, FREE), minibatch_size=4, costs=costs, planner="graphpipe")
    assert "2 devices (7.0 kB on the smallest)" in str(error.value)
    assert "more devices" in str(error.value) and "recomputation" in str(error.value)
