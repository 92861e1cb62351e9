from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from helpers.graphs import literal_graph, profile_of
from helpers.published import shared_graph

from lightning_gpp.cluster import Cluster, Device, Link, cluster_preset
from lightning_gpp.planner import PLANNERS, make_plan, validate_plan
from lightning_gpp.planner.baselines.piper_search import PiperPlan, search
from lightning_gpp.planner.make_plan import plan_request
from lightning_gpp.planner.step_time.evaluate import evaluate_plan
from lightning_gpp.workloads import mmt
from lightning_gpp.workloads.piper import (
    PiperEdge,
    PiperInstance,
    PiperOperator,
    Tmpc,
    read_piper_instance,
)


@pytest.mark.parametrize(
    ("num_devices", "memory_bytes", "seconds_per_sample", "num_stages"),
    [(4, 80e9, 0.115596847, 1), (8, 16e9, 0.0670635686, 2)],
)
def test_the_published_objective(num_devices, memory_bytes, seconds_per_sample, num_stages):
    """What Piper's own program finds for its ``resnet.json``, scaled to seconds."""
    instance = replace(
        read_piper_instance(shared_graph("piper/resnet.json"), time_unit_s=1e-3),
        num_devices=num_devices,
        memory_bytes=memory_bytes,
        bandwidth_bytes_per_s=2.5e10,
    )
    found = search(instance)
    assert found.seconds_per_sample == pytest.approx(seconds_per_sample, rel=1e-8)
    assert len(found.stages) == num_stages


def random_instance(seed: int, *, memory_bytes: float = 25.0) -> PiperInstance:
    """Up to five operators, edges also past neighbours, two ways each."""
    choose = random.Random(seed)
    count = choose.randint(2, 5)
    pairs = [p for p in itertools.combinations(range(count), 2) if choose.random() < 0.5]
    edges = tuple(PiperEdge(*pair, float(choose.randint(0, 5))) for pair in pairs)
    operators = []
    for number in range(count):
        seconds, kept = float(choose.randint(1, 12)), choose.randint(1, 12)
        plain = Tmpc(seconds, choose.randint(0, 9), kept, 2.0)
        again = dataclasses.replace(
            plain,
            seconds_per_sample=seconds * 1.5,
            memory_bytes_in_flight=kept / 4,
            memory_bytes_fixed=3.0,
        )
        operators.append(PiperOperator(number, f"op{number}", (plain, again)))
    return PiperInstance(tuple(operators), edges, choose.randint(1, 5), memory_bytes, 10.0, 12)


Choice = tuple[frozenset[int], int]  # operators, d


def divisions(instance: PiperInstance) -> Iterator[list[Choice]]:
    """Every pipeline: sets of operators in topological order with their degrees."""

    def after(done: frozenset[int], devices: int) -> Iterator[list[Choice]]:
        rest = [o.id for o in instance.operators if o.id not in done]
        if not rest:
            yield []
        for size in range(1, len(rest) + 1):
            for stage in map(frozenset, itertools.combinations(rest, size)):
                inputs = {e.source for e in instance.edges if e.target in stage}
                if not inputs <= done | stage:
                    continue
                for d in range(1, devices + 1):
                    if instance.num_samples % d == 0:
                        for more in after(done | stage, devices - d):
                            yield [(stage, d), *more]

    yield from after(frozenset(), instance.num_devices)


def stage_s(instance: PiperInstance, stage: Choice, y: int) -> float:
    """Seconds per sample with the greedy choice of ways, operator by operator."""
    members, d = stage
    ways = {o.id: o.ways for o in instance.operators if o.id in members}
    chosen = dict.fromkeys(members, 0)

    def memory(number: int, way: int) -> float:
        tmpc = ways[number][way]
        return tmpc.memory_bytes_in_flight * y + tmpc.memory_bytes_fixed

    excess = sum(memory(n, 0) for n in members) - instance.memory_bytes
    saved = {n: memory(n, 0) - memory(n, 1) for n in members}
    price = {
        n: (ways[n][1].seconds_per_sample - ways[n][0].seconds_per_sample) / saved[n]
        for n in members
        if saved[n] > 0
    }
    for n in sorted(price, key=lambda n: (price[n], n)):
        if excess > 0:
            chosen[n], excess = 1, excess - saved[n]
    if excess > 0:
        return math.inf
    total = 0.0
    for n in members:
        tmpc = ways[n][chosen[n]]
        cut = sum(
            edge.size_bytes
            for edge in instance.edges
            if edge.target == n and edge.source not in members
        )
        cut += sum(
            edge.size_bytes
            for edge in instance.edges
            if edge.source == n and edge.target not in members
        )
        sent = 2 * cut / d + 4 * (d - 1) * tmpc.parameter_bytes / d / instance.num_samples
        total += tmpc.seconds_per_sample / d + sent / instance.bandwidth_bytes_per_s
    return total


def slowest_s(instance: PiperInstance, stages: list[Choice]) -> float:
    copies = [d for _, d in stages]
    if sum(copies) > instance.num_samples:
        return math.inf
    return max(
        stage_s(instance, stage, -(-sum(copies[i:]) // stage[1])) for i, stage in enumerate(stages)
    )


def choices(found: PiperPlan) -> list[Choice]:
    return [(frozenset(s.operators), s.data_parallel) for s in found.stages]


@pytest.mark.parametrize("seed", range(25))
def test_the_best_of_all_divisions(seed):
    instance = random_instance(seed)
    best = min(slowest_s(instance, stages) for stages in divisions(instance))
    found = search(instance)
    if found is None:
        assert best == math.inf
        return
    assert found.seconds_per_sample == pytest.approx(best)
    assert slowest_s(instance, choices(found)) == pytest.approx(best)


def test_many_branches_are_refused_with_the_reason():
    workload = mmt(num_branches=8, layers_per_branch=2)
    cluster = cluster_preset("summit", num_devices=4)
    with pytest.raises(ValueError, match=r"too many combinations of .*limit 40,000"):
        make_plan(
            workload.graph,
            cluster,
            planner="piper",
            costs=workload.costs_for(cluster, 64),
            minibatch_size=64,
            num_microbatches=8,
        )


# --- the planner -----------------------------------------------------------------------------


def hosts(*sizes: int, memory_bytes: int | None = None) -> Cluster:
    devices = [
        Device(f"{host}:{i}", host=f"host{host}", memory_bytes=memory_bytes)
        for host, size in enumerate(sizes)
        for i in range(size)
    ]
    return Cluster(tuple(devices), Link(4e9), Link(1e9))


def two_branches(**state: str):
    branches = {f"{b}.{i}": f"{b}.{i - 1}" if i else "x" for b in "ab" for i in range(3)}
    operators = branches | {"cat()": "a.2 b.2", "head": "cat()"}
    return literal_graph(operators, state={name: [value] for name, value in state.items()})


def request_of(cluster: Cluster | int, graph=None, minibatch_size: int = 32, **options):
    graph = graph or two_branches()
    costs = options.pop("costs", None) or profile_of(graph)
    return plan_request(graph, cluster, minibatch_size=minibatch_size, costs=costs, **options)


@pytest.mark.parametrize("cluster", [1, 2, 4, hosts(2, 2)])
def test_plans_are_valid_chains(cluster):
    request = request_of(cluster)
    plan = PLANNERS["piper"](request)
    validate_plan(plan, request.graph, request.num_devices)
    assert plan.is_chain
    assert evaluate_plan(plan, request).is_feasible


def test_state_has_no_replicas_and_the_last_stage_makes_an_output():
    graph = literal_graph(
        {"a": "x", "b": "a", "c": "b", "d": "b"}, outputs=["c"], state={"b": ["s"]}
    )
    heavy = profile_of(graph, {"a": 1e-2, "b": 1e-3, "c": 1e-3, "d": 1e-3})
    request = request_of(4, graph, costs=heavy)
    plan = PLANNERS["piper"](request)
    validate_plan(plan, graph, 4)
    (with_state,) = [stage for stage in plan.stages if "b" in stage.operators]
    assert with_state.num_replicas == 1
    assert any(stage.num_replicas > 1 for stage in plan.stages)
    assert "c" in plan.stages[-1].operators
