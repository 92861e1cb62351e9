from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import accumulate

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.planner import PLANNERS, make_plan, validate_plan
from lightning_gpp.planner.baselines.pipedream import Layers, Segment, pipedream_stages
from lightning_gpp.planner.make_plan import plan_request
from lightning_gpp.planner.step_time.evaluate import evaluate_plan

BANDWIDTH = 100.0


def layers(compute, parameters=None, activations=None, single=None) -> Layers:
    def sums(values):
        return tuple(accumulate(values or [0.0] * len(compute), initial=0.0))

    names = tuple((f"layer{i}",) for i in range(len(compute)))
    return Layers(names, sums(compute), sums(parameters), sums(activations), sums(single))


def random_layers(seed: int, count: int) -> Layers:
    choose = random.Random(seed)
    draw = [[choose.randint(1, 20) for _ in range(count)] for _ in range(3)]
    return layers(draw[0], [20 * size for size in draw[1]], draw[2])


def divisions(start: int, stop: int, machines: int) -> Iterator[list[Segment]]:
    """Every division of layers into replicated stages on exactly so many machines."""
    for last in range(start, stop):
        for copies in range(1, machines + 1):
            stage = Segment(last, stop, copies)
            if last == start and copies == machines:
                yield [stage]
            elif last > start and copies < machines:
                for before in divisions(start, last, machines - copies):
                    yield [*before, stage]


def slowest_s(found: Layers, stages: list[Segment], machines: int, memory: float) -> float:
    """The slowest stage of one level by the paper's formula, infinite where the filter drops it."""
    times, used = [], 0
    for stage in stages:
        used += stage.num_replicas
        d = stage.num_replicas
        weights = found.parameter_bytes[stage.stop] - found.parameter_bytes[stage.start]
        kept = found.activation_bytes[stage.stop] - found.activation_bytes[stage.start]
        compute = found.compute_s[stage.stop] - found.compute_s[stage.start]
        if math.ceil((machines - used) / d) * (weights + kept) > memory:
            return math.inf
        times.append((compute + 4 * (d - 1) * weights / (BANDWIDTH * d)) / d)
    return max(times)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("memory", [math.inf, 250.0])
def test_the_best_of_all_divisions(seed, memory):
    machines = 1 + seed % 5
    found = random_layers(seed, count=2 + seed % 5)
    everything = list(divisions(0, len(found), machines))
    best = min(slowest_s(found, stages, machines, memory) for stages in everything)
    every = range(1, machines + 1)
    chosen = pipedream_stages(found, machines, BANDWIDTH, every, memory_bytes=memory)
    if not chosen:
        assert best == math.inf
    else:
        assert chosen in everything
        assert slowest_s(found, chosen, machines, memory) == pytest.approx(best)


def hosts(*sizes: int, memory_bytes: int | None = None) -> Cluster:
    devices = [
        Device(f"{host}:{i}", host=f"host{host}", memory_bytes=memory_bytes)
        for host, size in enumerate(sizes)
        for i in range(size)
    ]
    return Cluster(tuple(devices), Link(4e9), Link(1e9))


def two_branches() -> dict[str, str]:
    branches = {f"{b}.{i}": f"{b}.{i - 1}" if i else "x" for b in "ab" for i in range(3)}
    return branches | {"cat()": "a.2 b.2", "head": "cat()"}


def request_of(cluster: Cluster | int, minibatch_size: int = 32, **options):
    graph = literal_graph(two_branches())
    costs = options.pop("costs", None) or profile_of(graph)
    return plan_request(graph, cluster, minibatch_size=minibatch_size, costs=costs, **options)


@pytest.mark.parametrize("cluster", [1, 2, 4, hosts(2, 2), hosts(4, 4)])
def test_plans_are_chains_that_use_every_device(cluster):
    request = request_of(cluster)
    plan = make_plan(
        request.graph,
        request.cluster,
        planner="pipedream",
        costs=request.costs,
        minibatch_size=request.minibatch_size,
    )
    validate_plan(plan, request.graph, request.num_devices)
    assert plan.is_chain
    assert plan.planner == "pipedream"
    devices = [device for stage in plan.stages for device in stage.devices]
    assert sorted(devices) == list(range(request.num_devices))
    evaluation = evaluate_plan(plan, request)
    assert evaluation.depth >= plan.num_stages  # branches do not run side by side


def test_the_best_of_all_microbatch_sizes_is_taken():
    steps = {
        count: evaluate_plan(
            PLANNERS["pipedream"](request := request_of(2, num_microbatches=count)), request
        ).step_s
        for count in (1, 2, 4, 8, 16, 32)
    }
    free = request_of(2)
    chosen = evaluate_plan(PLANNERS["pipedream"](free), free)
    assert chosen.step_s == pytest.approx(min(steps.values()))
    assert chosen.step_s < max(steps.values())


def test_without_enough_memory_it_says_so():
    request = request_of(hosts(4, memory_bytes=1000))
    with pytest.raises(ValueError, match=r"no plan of pipedream fits into the .* \(1.0 kB on"):
        PLANNERS["pipedream"](request)
