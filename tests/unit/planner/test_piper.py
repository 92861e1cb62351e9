from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from helpers.graphs import literal_graph, profile_of
from helpers.published import piper_document, shared_graph, write_piper

from lightning_gpp.cluster import Cluster, Device, Link, cluster_preset
from lightning_gpp.planner import PLANNERS, Stage, make_plan, validate_plan
from lightning_gpp.planner.baselines.best_plan import uniform_plans
from lightning_gpp.planner.baselines.piper import instance_of
from lightning_gpp.planner.baselines.piper_search import PiperPlan, PiperRules, downsets, search
from lightning_gpp.planner.make_plan import plan_request
from lightning_gpp.planner.step_time.evaluate import evaluate_plan
from lightning_gpp.planner.units.units import build_units, indivisible_groups
from lightning_gpp.workloads import (
    PiperEdge,
    PiperInstance,
    PiperOperator,
    Tmpc,
    mmt,
    read_piper_instance,
)


@pytest.mark.parametrize(
    ("num_devices", "memory_bytes", "seconds_per_sample", "num_stages"),
    [(4, 80e9, 0.115596847, 1), (8, 16e9, 0.0670635686, 2)],
)
def test_the_published_objective(num_devices, memory_bytes, seconds_per_sample, num_stages):
    """What Piper's own program finds for its ``resnet.json``, scaled to seconds."""
    instance = replace(
        read_piper_instance(shared_graph("piper/resnet.json")),
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
        plain = Tmpc("plain", seconds, choose.randint(0, 9), kept, 2.0, {}, {})
        again = dataclasses.replace(
            plain,
            seconds_per_sample=seconds * 1.5,
            memory_bytes_in_flight=kept / 4,
            memory_bytes_fixed=3.0,
        )
        operators.append(PiperOperator(number, f"op{number}", {1: (plain, again)}))
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
    ways = {o.id: o.ways[1] for o in instance.operators if o.id in members}
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


def test_memory_decides_in_some_of_these_cases():
    """So the test above would notice if the knapsack were wrong."""
    tight = [search(random_instance(seed)) for seed in range(25)]
    loose = [search(random_instance(seed, memory_bytes=1e9)) for seed in range(25)]
    assert any(found is None for found in tight)
    assert any(
        found and found.seconds_per_sample > other.seconds_per_sample
        for found, other in zip(tight, loose)
    )
    assert any(found and any(any(stage.ways) for stage in found.stages) for found in tight)


def test_downsets_multiply_with_branches():
    chain = [[i + 1] if i < 4 else [] for i in range(5)]
    assert len(downsets(chain)) == 6
    #  three chains of four into one operator: its own set, and 5 ends per chain
    branches = [[4 * b + i + 1] if i < 3 else [12] for b in range(3) for i in range(4)] + [[]]
    assert len(downsets(branches)) == 1 + 5**3
    with pytest.raises(ValueError, match=r"101 already|limit of 100: their number multiplies"):
        downsets(branches, limit=100)


def test_many_branches_are_refused_with_the_reason():
    workload = mmt(num_branches=8, layers_per_branch=2)
    cluster = cluster_preset("summit", num_devices=4)
    with pytest.raises(ValueError, match=r"more than its limit of 40000.* parallel branch"):
        make_plan(
            workload.graph,
            cluster,
            planner="piper",
            costs=workload.costs_for(cluster, 64),
            minibatch_size=64,
            num_microbatches=8,
        )


def test_ways_that_the_knapsack_cannot_choose_from(tmp_path):
    document = piper_document()
    ways = document["nodes"][0]["TMPCs"]["1"]
    path = write_piper(
        tmp_path / "w.json", document, *("nodes", 0, "TMPCs", "1"), value=[*ways, ways[0]]
    )
    with pytest.raises(ValueError, match=r"'a' has 3 ways to run on 1 devices; .* at most 2"):
        search(read_piper_instance(path))
    path = write_piper(
        tmp_path / "w.json", document, *("nodes", 0, "TMPCs", "1", 1, "parameterSize"), value=1.0
    )
    with pytest.raises(ValueError, match=r"'a': ways .* must have the same parameterSize"):
        search(read_piper_instance(path))


def test_an_instance_can_be_asked_with_other_devices(tmp_path):
    instance = read_piper_instance(write_piper(tmp_path / "w.json", piper_document()))
    alone = search(replace(instance, num_devices=1))
    assert alone.seconds_per_sample == pytest.approx(18e-3)  # 3 + 6 + 9 ms
    assert search(replace(instance, num_devices=1, memory_bytes=1e7)) is None
    slow = search(replace(instance, num_devices=2, bandwidth_bytes_per_s=1e3))
    # Cutting an edge would take 2000 s; one stage on two devices synchronises 12 MB in 64 samples.
    assert len(slow.stages) == 1
    expected = 18e-3 / 2 + 4 * 12e6 / 2 / 64 / 1e3
    assert slow.seconds_per_sample == pytest.approx(min(expected, 18e-3))


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


def test_stages_recompute_where_that_is_allowed_and_needed():
    graph = literal_graph({"a": "x", "b": "a", "c": "b", "d": "c"})
    profile = profile_of(graph)
    heavy = {
        name: dataclasses.replace(cost, activation_bytes=10_000)
        for name, cost in profile.operators.items()
    }
    costs = dataclasses.replace(profile, operators=heavy)
    options = {"costs": costs, "num_microbatches": 8}
    cluster = hosts(2, memory_bytes=35_000)
    with pytest.raises(ValueError, match="piper found no plan for 2 devices"):
        PLANNERS["piper"](request_of(cluster, graph, **options))
    request = request_of(cluster, graph, may_recompute=True, **options)
    plan = PLANNERS["piper"](request)
    assert plan.stages[0].recompute
    assert evaluate_plan(plan, request).is_feasible


def test_the_problem_that_a_model_graph_states():
    graph = two_branches()
    request = request_of(hosts(2, 2, memory_bytes=10**6), graph, may_recompute=True)
    units = build_units(graph, request.profile(8), indivisible_groups(graph))
    instance = instance_of(request, units, microbatch_size=8)
    assert (instance.num_devices, instance.num_samples, instance.memory_bytes) == (4, 4, 10**6)
    assert instance.bandwidth_bytes_per_s == 1e9  # between hosts
    assert PiperEdge(6, 7, 8 * 16 * 4.0) in instance.edges  # cat -> head: 16 floats a sample
    plain, again = instance.operators[0].ways[1]
    cost = request.profile(8).operators["a_0"]
    assert plain.seconds_per_sample == pytest.approx(cost.forward_s + cost.backward_s)
    assert plain.memory_bytes_fixed == 4 * 1000  # parameter, gradient, two values of Adam
    assert plain.memory_bytes_in_flight == cost.activation_bytes
    assert again.seconds_per_sample == pytest.approx(2 * cost.forward_s + cost.backward_s)
    assert again.memory_bytes_fixed == 4 * 1000 + cost.activation_bytes
    assert again.memory_bytes_in_flight == 0


def test_operators_with_state_do_not_recompute():
    instance = dataclasses.replace(random_instance(3), num_devices=1, memory_bytes=1e9)
    ids = frozenset(operator.id for operator in instance.operators)
    kept = sum(o.ways[1][0].memory_bytes_in_flight + 2.0 for o in instance.operators)
    tight = dataclasses.replace(instance, memory_bytes=kept - 1.0)
    assert any(search(tight, PiperRules(whole_stages=True)).stages[0].ways)
    assert search(tight, PiperRules(whole_stages=True, single=ids)) is None
    assert search(instance, PiperRules(whole_stages=True, single=ids)) is not None


def test_replicas_take_turns_or_share_microbatches():
    request = request_of(4, minibatch_size=32)
    stages = [Stage(0, ("a",), (0, 1), 2), Stage(1, ("b",), (2,))]
    turns, share = uniform_plans(request, stages, 4.0, "x")
    assert turns.num_microbatches == 8  # of 4 samples, two at a time in the first stage
    assert [stage.microbatch_multiple for stage in turns.stages] == [2, 1]
    assert share.num_microbatches == 16  # of 2 samples, one for each replica
    assert [stage.microbatch_multiple for stage in share.stages] == [2, 2]
    (turns,) = uniform_plans(request, stages, 1.0, "x")  # one sample cannot be shared
    assert turns.num_microbatches == 32
    assert [p.num_microbatches for p in uniform_plans(request, stages, 32.0, "x")] == [2]
    (alone,) = uniform_plans(request, [Stage(0, ("b",), (2,))], 4.0, "x")
    assert alone.num_microbatches == 8


def test_rules_of_the_last_stage_and_of_copies():
    instance = random_instance(3, memory_bytes=1e9)
    ids = [operator.id for operator in instance.operators]
    free = search(instance, PiperRules(last=frozenset(ids)))
    assert free == search(instance)
    alone = search(instance, PiperRules(single=frozenset(ids)))
    assert all(stage.data_parallel == 1 for stage in alone.stages)
    assert search(instance, PiperRules(last=frozenset())) is None
