from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from itertools import accumulate

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.planner import PLANNERS, make_plan, validate_plan
from lightning_gpp.planner.baselines.pipedream import (
    Layers,
    Level,
    Segment,
    cluster_levels,
    linear_layers,
    pipedream_stages,
    solve_levels,
    stage_devices,
)
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
def test_one_level_is_the_best_of_all_divisions(seed, memory):
    machines = 1 + seed % 5
    found = random_layers(seed, count=2 + seed % 5)
    level = Level(machines, BANDWIDTH)
    everything = list(divisions(0, len(found), machines))
    best = min(slowest_s(found, stages, machines, memory) for stages in everything)
    stages = pipedream_stages(found, [level], memory_bytes=memory)
    if stages is None:
        assert best == math.inf
    else:
        chosen = [segment for (segment,) in stages]
        assert chosen in everything
        assert slowest_s(found, chosen, machines, memory) == pytest.approx(best)


def test_the_filter_decides_in_some_of_these_cases():
    """So the test above would notice if it were wrong."""
    best = {
        memory: [
            solve_levels(
                random_layers(seed, 2 + seed % 5),
                [Level(1 + seed % 5, BANDWIDTH)],
                memory_bytes=memory,
            )[0][0][-1][-1][0]
            for seed in range(12)
        ]
        for memory in (math.inf, 250.0)
    }
    pairs = list(zip(best[math.inf], best[250.0]))
    assert any(loose < tight for loose, tight in pairs)


@pytest.mark.parametrize("seed", range(6))
def test_two_levels_are_the_best_of_all_divisions(seed):
    """Hosts of 2 devices: the slowest stage of a host, shared by the hosts that repeat it."""
    found = random_layers(seed, count=4)
    outer_bandwidth, hosts, size = 30.0, 3, 2

    def host_s(start: int, stop: int) -> float:
        inner = divisions(start, stop, size)
        return min(slowest_s(found, stages, size, math.inf) for stages in inner)

    def division_s(stages: list[Segment]) -> float:
        times = []
        for stage in stages:
            d = stage.num_replicas
            weights = found.parameter_bytes[stage.stop] - found.parameter_bytes[stage.start]
            synchronise = 4 * (d - 1) * weights / (outer_bandwidth * d)
            shared = size if len(stages) == 1 else 1  # as the published code has it
            times.append((host_s(stage.start, stage.stop) + synchronise / shared) / d)
        return max(times)

    feasible = [
        stages
        for stages in divisions(0, 4, hosts)
        if all(stage.stop > stage.start for stage in stages)
    ]
    levels = [Level(size, BANDWIDTH), Level(hosts, outer_bandwidth)]
    best = min(map(division_s, feasible))
    assert solve_levels(found, levels)[-1][0][3][hosts][0] == pytest.approx(best)
    stages = pipedream_stages(found, levels)
    assert stages[0][0].start == 0
    assert stages[-1][0].stop == 4
    assert sum(inner.num_replicas * outer.num_replicas for inner, outer in stages) == hosts * size


def test_one_stage_for_all_hosts_shares_its_synchronisation():
    """As the published code has it, between hosts every device of a host takes its part."""
    found = layers([10.0], parameters=[60.0])
    inner_s = (10.0 + 4 * 1 * 60.0 / (100.0 * 2)) / 2
    outer_s = (inner_s + 4 * 2 * 60.0 / (30.0 * 3) / 2) / 3
    levels = [Level(2, 100.0), Level(3, 30.0)]
    assert solve_levels(found, levels)[-1][0][0][3][0] == pytest.approx(outer_s)


def test_replicas_can_be_limited():
    stages = pipedream_stages(layers([9.0, 1.0]), [Level(4, BANDWIDTH)])
    assert [segment.num_replicas for (segment,) in stages] == [4]  # 2.5 s, or 3 and 1: 3 s
    limited = pipedream_stages(layers([9.0, 1.0]), [Level(4, BANDWIDTH)], replicas=[(1, 2)])
    assert [segment.num_replicas for (segment,) in limited] == [2, 2]
    # As published all machines are used, and two layers cannot fill four one by one.
    assert pipedream_stages(layers([9.0, 1.0]), [Level(4, BANDWIDTH)], replicas=[(1,)]) is None


def test_layers_with_state_have_no_replicas():
    stages = pipedream_stages(layers([9.0, 1.0], single=[True, False]), [Level(4, BANDWIDTH)])
    assert [segment.num_replicas for (segment,) in stages] == [1, 3]


def hosts(*sizes: int, memory_bytes: int | None = None) -> Cluster:
    devices = [
        Device(f"{host}:{i}", host=f"host{host}", memory_bytes=memory_bytes)
        for host, size in enumerate(sizes)
        for i in range(size)
    ]
    return Cluster(tuple(devices), Link(4e9), Link(1e9))


def test_levels_of_clusters():
    assert cluster_levels(hosts(2, 2, 2)) == [Level(2, 4e9), Level(3, 1e9)]
    assert cluster_levels(hosts(4)) == [Level(4, 4e9)]
    assert cluster_levels(hosts(1, 1)) == [Level(2, 1e9)]
    assert cluster_levels(hosts(2, 1)) == [Level(3, 1e9)]  # hosts differ


def test_copies_in_several_hosts_take_the_same_places():
    # Two hosts of 4 run 3 + 1 devices as copies of each other, a third host runs 4 of one stage.
    twice, once = Segment(0, 2, 2), Segment(2, 3, 1)
    stages = [(Segment(0, 1, 3), twice), (Segment(1, 2, 1), twice), (Segment(2, 3, 4), once)]
    assert list(stage_devices(stages, [Level(4, 4e9), Level(3, 1e9)])) == [
        (0, 1, 2, 4, 5, 6),
        (3, 7),
        (8, 9, 10, 11),
    ]


def two_branches() -> dict[str, str]:
    branches = {f"{b}.{i}": f"{b}.{i - 1}" if i else "x" for b in "ab" for i in range(3)}
    return branches | {"cat()": "a.2 b.2", "head": "cat()"}


def request_of(cluster: Cluster | int, minibatch_size: int = 32, **options):
    graph = literal_graph(two_branches())
    costs = options.pop("costs", None) or profile_of(graph)
    return plan_request(graph, cluster, minibatch_size=minibatch_size, costs=costs, **options)


def test_the_line_ends_with_an_output_and_keeps_common_state_together():
    graph = literal_graph(
        {"a": "x", "b": "a", "c": "b", "d": "a"}, outputs=["c"], state={"a": ["s"], "b": ["s"]}
    )
    found = linear_layers(plan_request(graph, 2, minibatch_size=4, costs=profile_of(graph)), 4)
    assert found.operators == (("a", "b"), ("d",), ("c",))
    assert found.compute_s == pytest.approx((0, 6e-3, 9e-3, 12e-3))
    assert found.parameter_bytes == (0, 2000, 3000, 4000)
    assert found.num_single == (0, 1, 1, 1)


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


@pytest.mark.parametrize("planner", ["pipedream", "piper"])
@pytest.mark.parametrize("limit", [1, 2])
def test_replicas_are_limited_over_hosts_too(planner, limit):
    # Two hosts of 4 devices, 8 layers of which one has most of the work.
    operators = two_branches()
    profile = profile_of(
        literal_graph(operators),
        {"head": 20e-3}
        | dict.fromkeys(
            [name.replace(".", "_").removesuffix("()") for name in operators if name != "head"],
            1e-3,
        ),
    )
    free = PLANNERS[planner](request_of(hosts(4, 4), costs=profile))
    assert max(stage.num_replicas for stage in free.stages) > 2
    plan = PLANNERS[planner](request_of(hosts(4, 4), costs=profile, max_replicas=limit))
    assert max(stage.num_replicas for stage in plan.stages) == limit


def test_without_enough_memory_it_says_how_much_is_needed():
    request = request_of(hosts(4, memory_bytes=1000))
    with pytest.raises(ValueError, match=r"no plan of pipedream fits into memory: .*1.0 kB"):
        PLANNERS["pipedream"](request)


def test_the_memory_filter_is_a_second_chance():
    """The first layers keep most, and the first stages keep it for most micro-batches."""
    profile = request_of(4).costs.profiles[0]
    kept_bytes = [20_000, 20_000, 10_000, 10_000, 0, 1000, 1000, 0]
    forward_s = [1e-3, 2e-3, 2e-3, 1e-3, 2e-3, 5e-3, 5e-3, 2e-3]
    operators = {
        name: dataclasses.replace(cost, activation_bytes=size, forward_s=seconds)
        for (name, cost), size, seconds in zip(profile.operators.items(), kept_bytes, forward_s)
    }
    costs = dataclasses.replace(profile, operators=operators)
    roomy = request_of(4, 64, costs=costs, num_microbatches=16)
    tight = request_of(hosts(4, memory_bytes=64_000), 64, costs=costs, num_microbatches=16)
    unfiltered = PLANNERS["pipedream"](roomy)
    assert not evaluate_plan(unfiltered, tight).is_feasible
    filtered = PLANNERS["pipedream"](tight)
    assert evaluate_plan(filtered, tight).is_feasible
