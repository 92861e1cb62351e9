"""The planner ``pipedream``: PipeDream's partitioning, the first baseline of the GraphPipe paper.

The model is put in a line and divided by PipeDream's recurrences
(:mod:`lightning_gpp.planner.pipedream.recurrence`) for every micro-batch size; the plan with the
shortest step by our cost model is taken. Two things are not as published: replicas come in powers
of two, since replicas take equal shares here, and devices whose hosts are not equally full are
planned as if there were no hosts, over the slowest link. The published memory filter is used only
when the plan without it does not fit (it counts versions of weights that synchronous training does
not keep, and no optimizer).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from lightning_gpp.cluster import Cluster
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.best_plan import BestPlan, best_plan
from lightning_gpp.planner.pipedream.recurrence import Level, Segment, pipedream_stages
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.uniform_replicas import ReplicatedStage, uniform_plans
from lightning_gpp.planner.units.linear import Layers, linear_layers

NAME = "pipedream"


def pipedream(request: PlanRequest) -> Plan:
    """The best plan that PipeDream's recurrences find.

    Raises:
        ValueError: no plan can run and fits into the memory of the devices.
    """
    return best_plan(request, NAME, _show)


def _show(best: BestPlan, request: PlanRequest) -> None:
    memories = [d.memory_bytes for d in request.cluster.devices if d.memory_bytes is not None]
    for microbatch_size in reversed(request.microbatch_sizes):
        layers = linear_layers(request, microbatch_size)
        fits = best.show(_plans(request, layers, microbatch_size, None))
        if not fits and memories:
            best.show(_plans(request, layers, microbatch_size, min(memories)))


def _plans(
    request: PlanRequest, layers: Layers, microbatch_size: float, memory_bytes: int | None
) -> Iterator[Plan]:
    levels = cluster_levels(request.cluster)
    name = f"{NAME} (estimated)" if request.is_estimated else NAME
    for replicas in replica_counts(request, levels):
        found = pipedream_stages(layers, levels, replicas=replicas, memory_bytes=memory_bytes)
        if found is None:
            continue
        stages = [
            ReplicatedStage(tuple(chain(*layers.operators[inner.start : inner.stop])), devices)
            for (inner, *_), devices in zip(found, stage_devices(found, levels))
        ]
        yield from uniform_plans(request, stages, microbatch_size, name)


def replica_counts(request: PlanRequest, levels: Sequence[Level]) -> Iterator[list[Sequence[int]]]:
    """Numbers of replicas at each level.

    A stage has as many as those of its levels multiplied. So where the request limits them, the
    limit is shared between the levels in every way.
    """
    limit = request.max_replicas
    if limit is None or len(levels) == 1:
        yield [request.replica_counts(level.num_machines) for level in levels]
        return
    for most in request.replica_counts(levels[0].num_machines):
        limits = most, limit // most
        yield [
            [count for count in request.replica_counts(level.num_machines) if count <= limit]
            for level, limit in zip(levels, limits)
        ]


def cluster_levels(cluster: Cluster) -> list[Level]:
    """Devices of a host, then hosts; one level where there is one host or hosts differ."""
    sizes: dict[tuple[str, str], int] = {}
    for device in cluster.devices:
        sizes[device.rack, device.host] = sizes.get((device.rack, device.host), 0) + 1
    between = cluster.slowest_link.bandwidth_bytes_per_s
    (size, *others) = set(sizes.values())
    if others or size == 1 or len(sizes) == 1:
        return [Level(cluster.num_devices, between)]
    return [Level(size, cluster.host_link.bandwidth_bytes_per_s), Level(len(sizes), between)]


def stage_devices(
    stages: Sequence[Sequence[Segment]], levels: Sequence[Level]
) -> Iterator[tuple[int, ...]]:
    """Devices of every stage: consecutive ones, in every host that has a copy.

    Args:
        stages: of every stage its segment at each level, devices of a host first.
        levels: the levels.
    """
    size = levels[0].num_machines
    first_host, place, outer = 0, 0, None
    for inner, *hosts in stages:
        num_hosts = hosts[0].num_replicas if hosts else 1
        if hosts and hosts[0] is not outer:
            first_host, place, outer = (
                first_host + (outer.num_replicas if outer else 0),
                0,
                hosts[0],
            )
        yield tuple(
            (first_host + host) * size + place + copy
            for host in range(num_hosts)
            for copy in range(inner.num_replicas)
        )
        place += inner.num_replicas
