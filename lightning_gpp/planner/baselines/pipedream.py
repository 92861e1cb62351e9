"""The planner ``pipedream``: PipeDream's partitioning, the first baseline of the GraphPipe paper.

The model is put in a line and divided by PipeDream's recurrence over all devices, for every
micro-batch size; the plan with the shortest step by our cost model is taken. Two things are not as
published: replicas come in powers of two, since replicas take equal shares here, and all devices
are one level, joined by the slowest link. The published memory filter is used only when the plan
without it does not fit (it counts versions of weights that synchronous training does not keep, and
no optimizer).

Sources: PipeDream (SOSP 2019), section 3.1, and its published optimizer
(github msr-fiddle/pipedream, ``optimizer_graph_hierarchical.py``), whose arithmetic this follows.
``A(j, m)`` is the time of the slowest stage of layers ``0 … j`` on ``m`` devices, per micro-batch::

    sync(i, j, m) = 4 (m - 1) / m * parameters(i, j) / bandwidth
    T(i, j, m)    = (compute(i, j) + sync(i, j, m)) / m
    A(j, m)       = min of T(0, j, m) and, over k and m', of max( A(k, m - m'), T(k+1, j, m') )

Transfers between stages are left out, as published unless activations are compressed.

The published memory filter keeps a stage from ``m'`` devices, of ``M``, when
``ceil((M - m) / m') * (activations + parameters)`` exceeds the memory, ``m`` being the devices of
the layers up to it. Stages with layers that can have no replicas get none. It takes
``O(layers^2 devices^2)`` time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.baselines.best_plan import BestPlan, best_plan, uniform_plans
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.units import build_units, indivisible_groups, order_to_end

NAME = "pipedream"


def pipedream(request: PlanRequest) -> Plan:
    """The best plan that PipeDream's recurrence finds.

    Raises:
        ValueError: no plan can run and fits into the memory of the devices.
    """
    return best_plan(request, NAME, _show)


def _show(best: BestPlan, request: PlanRequest) -> None:
    memories = [d.memory_bytes for d in request.cluster.devices if d.memory_bytes is not None]
    for microbatch_size in reversed(request.microbatch_sizes):
        layers = linear_layers(request, microbatch_size)
        fits = best.show(_plans(request, layers, microbatch_size, math.inf))
        if not fits and memories:
            best.show(_plans(request, layers, microbatch_size, min(memories)))


def _plans(
    request: PlanRequest, layers: Layers, microbatch_size: float, memory_bytes: float
) -> Iterator[Plan]:
    found = pipedream_stages(
        layers,
        request.num_devices,
        request.cluster.slowest_link.bandwidth_bytes_per_s,
        request.replica_counts(request.num_devices),
        memory_bytes,
    )
    stages: list[Stage] = []
    used = 0
    for one in found:
        devices = tuple(range(used, used + one.num_replicas))
        operators = (*chain(*layers.operators[one.start : one.stop]),)
        stages.append(Stage(len(stages), operators, devices, len(devices)))
        used += one.num_replicas
    if stages:
        yield from uniform_plans(request, stages, microbatch_size, request.named(NAME))


class Segment(NamedTuple):
    """A stage: layers ``start`` to ``stop`` (exclusive), and its replicas."""

    start: int
    stop: int
    num_replicas: int


def pipedream_stages(
    layers: Layers,
    num_devices: int,
    bandwidth_bytes_per_s: float,
    replicas: Sequence[int],
    memory_bytes: float = math.inf,
) -> list[Segment]:
    """The stages on all devices with the smallest slowest time per micro-batch.

    Args:
        layers: the model.
        num_devices: how many devices there are.
        bandwidth_bytes_per_s: between them.
        replicas: the numbers of replicas that a stage may have, ascending.
        memory_bytes: memory of a device for the published filter; no filter if not given.

    Returns:
        None at all if no division passes the filter.
    """
    compute_s, single = layers.compute_s, layers.num_single
    parameters, activations = layers.parameter_bytes, layers.activation_bytes

    def stage_s(first: int, last: int, used: int, copies: int) -> float:
        """Seconds of one stage, the last of stages on ``used`` devices."""
        weights = parameters[last + 1] - parameters[first]
        kept = activations[last + 1] - activations[first]
        is_full = math.ceil((num_devices - used) / copies) * (kept + weights) > memory_bytes
        if is_full or (copies > 1 and single[last + 1] > single[first]):
            return math.inf
        synchronise_s = 4 * (copies - 1) * weights / (bandwidth_bytes_per_s * copies)
        return (compute_s[last + 1] - compute_s[first] + synchronise_s) / copies

    # By last layer and devices: A, and the first layer and the devices of the last stage.
    table = [[(math.inf, 0, 0)] * (num_devices + 1) for _ in range(len(layers))]
    for j in range(len(layers)):
        for m in range(1, num_devices + 1):
            best = (stage_s(0, j, m, m) if m in replicas else math.inf), 0, m
            for k in range(j):
                for copies in replicas:
                    if copies >= m:
                        break
                    found = max(table[k][m - copies][0], stage_s(k + 1, j, m, copies))
                    if found < best[0]:
                        best = found, k + 1, copies
            table[j][m] = best
    if table[-1][-1][0] == math.inf:
        return []
    stages: list[Segment] = []
    stop, left = len(layers), num_devices
    while stop:
        _, start, copies = table[stop - 1][left]
        stages.append(Segment(start, stop, copies))
        stop, left = start, left - copies
    return stages[::-1]


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers with running sums, so that the costs of a run of layers are one subtraction.

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
    order = order_to_end(dict(enumerate(map(set, units.successors))), units.finals)
    assert order is not None  # units have no circle, and a final one
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
