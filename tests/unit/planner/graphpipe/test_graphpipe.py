from __future__ import annotations

import dataclasses

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Cluster, Device, Link, uniform_cluster
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner import PlanRequest, make_plan, validate_plan
from lightning_gpp.planner.graphpipe import choice, planner
from lightning_gpp.planner.graphpipe.planner import AS_GOOD, search_exclusive, search_plans
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
    best = search_exclusive(request).ranked[0]
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


def test_a_chain_is_planned_as_sequential_does():
    graph = literal_graph({"a": "x", "b": "a", "c": "b", "d": "c"})
    request = plan_request(graph, 2, minibatch_size=16, costs=profile_of(graph))
    names = ("graphpipe_exclusive", "sequential")
    steps = [evaluate_plan(PLANNERS[name](request), request).step_s for name in names]
    assert steps[0] == pytest.approx(steps[1])


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


def test_what_would_make_a_problem_feasible():
    graph = literal_graph(dict(zip("abcd", "xabc")))
    devices = tuple(Device(str(i), memory_bytes=7_000) for i in range(2))
    costs = fixed_costs(graph)
    with pytest.raises(ValueError, match="no division of the model") as error:
        make_plan(graph, Cluster(devices, FREE), minibatch_size=4, costs=costs, planner="graphpipe")
    #  four parameters of 1000 bytes, each with its gradient and two values of the optimizer
    assert "2 devices need 8" in str(error.value)
    assert "4 devices would do" in str(error.value)


def test_results_are_ranked():
    graph = branches(num_branches=2, length=4)
    request = plan_request(graph, 4, minibatch_size=16, costs=profile_of(graph))
    result = search_plans(request)
    steps = [one.step_s for one in result.ranked]
    assert steps[1:] == sorted(steps[1:]) and len(steps) > 1
    assert steps[0] <= AS_GOOD * min(steps)
    assert result.best == result.ranked[0].plan
    validate_plan(result.best, graph, 4)


def test_many_devices_are_no_worse_than_half_of_them_where_that_is_as_good(monkeypatch):
    """Small budgets leave many devices with the plan on half of them, or a better one."""
    monkeypatch.setattr(planner, "BUDGET", 2_000)
    graph = branches(num_branches=3, length=3)
    cluster = uniform_cluster(8, Link(bandwidth_bytes_per_s=1e5, latency_s=1e-3))

    def step_s(num_devices: int, budget: int) -> float:
        own = cluster.first(num_devices)
        request = plan_request(graph, own, minibatch_size=8, costs=profile_of(graph))
        return planner.climbed(request, budget)[0].best_s

    on_half_s = step_s(4, planner.BUDGET * 2)
    assert step_s(8, budget=0) > on_half_s
    monkeypatch.setattr(planner, "FEW_DEVICES", 4)
    assert step_s(8, budget=0) <= on_half_s * (1 + 1e-9)


def test_seven_branches_fill_eight_devices():
    """Seven times eight layers: seven on each device, of which most have parts of two branches."""
    operators = {
        f"b{branch}.{layer}": f"b{branch}.{layer - 1}" if layer else "x"
        for branch in range(7)
        for layer in range(8)
    }
    graph = literal_graph(operators | {"join": " ".join(f"b{branch}.7" for branch in range(7))})
    profile = profile_of(graph, {o.name: 0.0 if o.name == "join" else 1.0 for o in graph})
    cluster = uniform_cluster(8, Link(1e30))
    request = PlanRequest(graph, cluster, Costs((profile,)), 64, 16, max_replicas=1)
    found = evaluate_plan(search_plans(request).best, request)
    layer_s = 3.0 / 4  # forward and backward, per sample
    assert found.seconds_per_sample == pytest.approx(7 * layer_s)
    assert len(found.devices) == 8


def test_what_fits_nowhere_takes_no_looks_of_what_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long chain that one device cannot hold: all replicas are tried first, for nothing.

    It had ended in the search of all divisions, which takes as long as the cube of the operators.
    """
    graph = branches(num_branches=1, length=60)
    kept_bytes = 4 * sum(parameter.size_bytes for parameter in graph.parameters)
    free = uniform_cluster(4, FREE)
    small = [dataclasses.replace(one, memory_bytes=int(0.6 * kept_bytes)) for one in free.devices]
    cluster = dataclasses.replace(free, devices=tuple(small))
    request = plan_request(graph, cluster, minibatch_size=4, costs=profile_of(graph))
    monkeypatch.setattr(choice, "BUDGET", 70)
    monkeypatch.setattr(choice, "_look_everywhere", lambda *_: pytest.fail("looks everywhere"))
    assert len(search_exclusive(request).best.stages) > 1
