"""The planner ``pipedream``: PipeDream's partitioning, the first baseline of the GraphPipe paper.

The model is put in a line and divided by PipeDream's recurrences, level by level, for every
micro-batch size; the plan with the shortest step by our cost model is taken. Two things are not as
published: replicas come in powers of two, since replicas take equal shares here, and devices whose
hosts are not equally full are planned as if there were no hosts, over the slowest link. The
published memory filter is used only when the plan without it does not fit (it counts versions of
weights that synchronous training does not keep, and no optimizer).

Sources: PipeDream (SOSP 2019), section 3.1, and its published optimizer
(github msr-fiddle/pipedream, ``optimizer_graph_hierarchical.py``), whose arithmetic this follows.
``A(i, j, m)`` is the time of the slowest stage of layers ``i … j`` on ``m`` machines, per
micro-batch::

    sync(i, j, m) = 4 (m - 1) / m * parameters(i, j) / bandwidth
    T(i, j, m)    = (compute(i, j) + sync(i, j, m) / inner) / m
    A(i, j, m)    = min of T(i, j, m) and, over k and m', of
                    max( A(i, k, m - m'), (compute(k+1, j) + sync(k+1, j, m')) / m' )

A "machine" of the first level is a device, and ``inner`` is 1; of the second it is a host, whose
``compute(i, j)`` is the first level's ``A(i, j, devices of a host)``; ``inner`` is that number of
devices, which divides the synchronisation of a stage that is all of ``i … j`` only. Transfers
between stages are left out, as published unless activations are compressed.

The published memory filter keeps a stage from ``m'`` machines, of ``M``, when
``ceil((M - m) / m') * (activations + parameters)`` exceeds the memory, ``m`` being the machines of
the layers up to it. Stages with layers that can have no replicas get none.

One level takes ``O(layers^3 machines^2)`` time, the last one ``O(layers^2 machines^2)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from lightning_gpp.cluster import Cluster
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.baselines.best_plan import BestPlan, best_plan, uniform_plans
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.units.divisions import candidate_orders
from lightning_gpp.planner.units.units import build_units, indivisible_groups

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
    name = request.named(NAME)
    for replicas in replica_counts(request, levels):
        found = pipedream_stages(layers, levels, replicas=replicas, memory_bytes=memory_bytes)
        if found is None:
            continue
        stages = [
            Stage(number, (*chain(*layers.operators[inner.start : inner.stop]),), home, len(home))
            for number, ((inner, *_), home) in enumerate(zip(found, stage_devices(found, levels)))
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
        now = hosts[0] if hosts else None
        if now is not outer:
            first_host, place = first_host + (outer.num_replicas if outer else 0), 0
            outer = now
        yield tuple(
            (first_host + host) * size + place + copy
            for host in range(now.num_replicas if now else 1)
            for copy in range(inner.num_replicas)
        )
        place += inner.num_replicas


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a hierarchy of machines.

    Attributes:
        num_machines: machines of this level in one of the next.
        bandwidth_bytes_per_s: between them.
    """

    num_machines: int
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers that the machines of a level run as one stage.

    Attributes:
        start: first layer.
        stop: the layer after the last one.
        num_replicas: machines of the level that run it, side by side.
    """

    start: int
    stop: int
    num_replicas: int


Table = list[list[list[tuple[float, int, int]]]]
"""By first layer, last layer and number of machines: ``A``, and the first layer and the machines of
the last stage."""


def pipedream_stages(
    layers: Layers,
    levels: Sequence[Level],
    *,
    replicas: Sequence[Sequence[int]] | None = None,
    memory_bytes: float | None = None,
) -> list[list[Segment]] | None:
    """The stages with the smallest slowest time per micro-batch.

    Args:
        layers: the model.
        levels: the hierarchy of machines, devices of a host first.
        replicas: at each level the numbers of replicas that a stage may have; all if not given, as
            published.
        memory_bytes: memory of a device for the published filter; no filter if not given.

    Returns:
        For every stage its segment at each level, devices of a host first: it has the product of
        their ``num_replicas`` copies. None if no division passes the filter.
    """
    tables = solve_levels(layers, levels, replicas=replicas, memory_bytes=memory_bytes)
    if tables[-1][0][-1][-1][0] == math.inf:
        return None
    stages: list[list[Segment]] = [[]]
    for table in reversed(tables):
        stages = [
            [segment, *outer]
            for outer in stages
            for segment in _segments(table, Segment(0, len(layers), 1) if not outer else outer[0])
        ]
    return stages


def _segments(table: Table, outer: Segment) -> list[Segment]:
    """The stages of the layers of a segment of the next level, on all machines of this one."""
    found: list[Segment] = []
    stop, machines = outer.stop, len(table[0][0]) - 1
    while stop > outer.start:
        _, start, copies = table[outer.start][stop - 1][machines]
        found.append(Segment(start, stop, copies))
        stop, machines = start, machines - copies
    return found[::-1]


def solve_levels(
    layers: Layers,
    levels: Sequence[Level],
    *,
    replicas: Sequence[Sequence[int]] | None = None,
    memory_bytes: float | None = None,
) -> list[Table]:
    """The tables of all levels; arguments are :func:`pipedream_stages`'s."""
    count, sums, inner = len(layers), layers.compute_s, 1
    compute_s = [[sums[j + 1] - sums[i] for j in range(count)] for i in range(count)]
    limit = math.inf if memory_bytes is None else memory_bytes
    tables: list[Table] = []
    for number, level in enumerate(levels):
        machines = level.num_machines
        counts = replicas[number] if replicas else range(1, machines + 1)
        starts = 1 if number == len(levels) - 1 else count
        tables.append(_solve(layers, compute_s, level, inner, starts, counts, limit))
        compute_s = [[row[machines][0] for row in rows] for rows in tables[-1]]
        inner = machines
    return tables


def _solve(
    layers: Layers,
    compute_s: Sequence[Sequence[float]],
    level: Level,
    inner: int,
    starts: int,
    replicas: Sequence[int],
    memory_bytes: float,
) -> Table:
    """``A`` for the first ``starts`` first layers."""
    count, machines = len(layers), level.num_machines
    parameters, activations = layers.parameter_bytes, layers.activation_bytes
    single = layers.num_single
    never = math.inf, 0, 0
    table = [[[never] * (machines + 1) for _ in range(count)] for _ in range(count)]

    def stage_s(first: int, last: int, used: int, copies: int, sharing: int) -> float:
        """Seconds of one stage, the last of stages on ``used`` machines."""
        weights = parameters[last + 1] - parameters[first]
        kept = activations[last + 1] - activations[first]
        is_full = math.ceil((machines - used) / copies) * (kept + weights) > memory_bytes
        if is_full or (copies > 1 and single[last + 1] > single[first]):
            return math.inf
        synchronise_s = 4 * (copies - 1) * weights / (level.bandwidth_bytes_per_s * copies)
        return (compute_s[first][last] + synchronise_s / sharing) / copies

    for i in range(starts):
        for j in range(i, count):
            for m in range(1, machines + 1):
                best = (stage_s(i, j, m, m, inner) if m in replicas else math.inf), i, m
                for k in range(i, j):
                    for copies in replicas:
                        if copies >= m:
                            break
                        last_s = stage_s(k + 1, j, m, copies, 1)
                        found = max(table[i][k][m - copies][0], last_s)
                        if found < best[0]:
                            best = found, k + 1, copies
                table[i][j][m] = best
    return table


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers 0, 1, … with sums up to each, so that a run of layers costs one subtraction.

    Attributes:
        operators: operator names of each layer.
        compute_s: seconds of forward and backward of all layers before each, and of all.
        parameter_bytes: bytes of parameters likewise.
        activation_bytes: bytes kept for the backward likewise.
        num_single: layers that can have no replicas (they change state of the module) likewise.
    """

    operators: tuple[tuple[str, ...], ...]
    compute_s: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    num_single: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.operators)


def linear_layers(request: PlanRequest, microbatch_size: float) -> Layers:
    """The operators of the model in one line, in the order of the model.

    GraphPipe's authors gave PipeDream their models like this (arXiv 2406.17145, section 7.1).

    Operators that must be in one stage are one layer, and one that makes an output comes last.

    Args:
        request: the model and the devices; of unequal devices the slowest kind counts.
        microbatch_size: in samples.
    """
    profile = request.profile(microbatch_size, request.slowest_kind(microbatch_size))
    units = build_units(request.graph, profile, indivisible_groups(request.graph))
    order = candidate_orders(units)[0]
    operators = tuple(units.operators[unit] for unit in order)
    bytes_of, graph = request.tables.parameter_bytes, request.graph
    kept = {name: cost.activation_bytes for name, cost in profile.operators.items()}
    return Layers(
        operators=operators,
        compute_s=_sums(units.compute_s[unit] for unit in order),
        parameter_bytes=_sums(bytes_of(names).all_bytes for names in operators),
        activation_bytes=_sums(sum(kept[name] for name in names) for names in operators),
        num_single=_sums(any(graph.operator[n].state for n in names) for names in operators),
    )


def _sums(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(accumulate(values, initial=0.0))
