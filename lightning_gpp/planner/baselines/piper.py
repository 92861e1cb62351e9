"""The planner ``piper``: Piper's dynamic program, the second baseline of the GraphPipe paper.

``piper_search`` solves Piper's own problem as published. The planner states a model graph as such
a problem, for every micro-batch size, and takes the plan with the shortest step by our cost
model. It has no tensor parallelism (our plans have none), replicas in powers of two (they take
equal shares here), and recomputes whole stages or none (a published option). Its one bandwidth is
that of the slowest link, its memory that of the smallest device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.baselines.best_plan import BestPlan, best_plan, uniform_plans
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.request_tables import edge_bytes
from lightning_gpp.planner.units import UnitGraph, build_units, indivisible_groups
from lightning_gpp.workloads.piper import PiperEdge, PiperInstance, PiperOperator, Tmpc

NAME = "piper"


def piper(request: PlanRequest) -> Plan:
    """The best plan that Piper's dynamic program finds.

    Raises:
        ValueError: the model has too many downsets (parallel branches), or no plan can run and
            fits into the memory of the devices.
    """
    return best_plan(request, NAME, _show)


def _show(best: BestPlan, request: PlanRequest) -> None:
    for microbatch_size in reversed(request.microbatch_sizes):
        best.show(_plans(request, microbatch_size))


def _plans(request: PlanRequest, microbatch_size: float) -> Iterator[Plan]:
    from lightning_gpp.planner.baselines.piper_search import PiperRules, search  # with numpy

    profile = request.profile(microbatch_size, request.slowest_kind(microbatch_size))
    units = build_units(request.graph, profile, indivisible_groups(request.graph))
    rules = PiperRules(
        data_parallel=request.replica_counts(request.num_devices),
        whole_stages=True,
        single=frozenset(
            unit
            for unit, names in enumerate(units.operators)
            if any(request.graph.operator[name].state for name in names)
        ),
        last=frozenset(units.finals),
    )
    found = search(instance_of(request, units, microbatch_size), rules)
    if found is None:
        return
    stages: list[Stage] = []
    used = 0
    for stage in found.stages:
        operators = tuple(name for unit in stage.operators for name in units.operators[unit])
        devices = tuple(range(used, used + stage.data_parallel))
        home = devices, len(devices), any(stage.ways)
        stages.append(Stage(len(stages), operators, *home))
        used += stage.data_parallel
    name = request.named(NAME)
    yield from uniform_plans(request, stages, microbatch_size, name)


def instance_of(request: PlanRequest, units: UnitGraph, microbatch_size: float) -> PiperInstance:
    """Piper's problem for a model graph; one of its samples is a micro-batch.

    Args:
        request: the model, the devices, the mini-batch.
        units: its operators; their positions are the ids.
        microbatch_size: in samples.
    """
    memories = [d.memory_bytes for d in request.cluster.devices if d.memory_bytes is not None]
    return PiperInstance(
        operators=tuple(
            PiperOperator(unit, names[0], _ways(request, names, microbatch_size))
            for unit, names in enumerate(units.operators)
        ),
        edges=tuple(_edges(request.graph, units, microbatch_size)),
        num_devices=request.num_devices,
        memory_bytes=float(min(memories, default=math.inf)),
        bandwidth_bytes_per_s=request.cluster.slowest_link.bandwidth_bytes_per_s,
        num_samples=round(request.minibatch_size / microbatch_size),
    )


def _ways(
    request: PlanRequest, operators: tuple[str, ...], microbatch_size: float
) -> tuple[Tmpc, ...]:
    """Keeping the activations, and computing them again where that is allowed."""
    profile = request.profile(microbatch_size, request.slowest_kind(microbatch_size))
    costs = [profile.operators[name] for name in operators]
    kept_bytes = sum(cost.activation_bytes for cost in costs)
    forward_s = sum(cost.forward_s for cost in costs)
    parameter_bytes, trained_bytes = request.tables.parameter_bytes(operators)
    plain = Tmpc(
        seconds_per_sample=forward_s + sum(cost.backward_s for cost in costs),
        parameter_bytes=parameter_bytes,
        memory_bytes_in_flight=kept_bytes,
        memory_bytes_fixed=parameter_bytes + trained_bytes * (1 + request.optimizer_values),
    )
    again = replace(
        plain,
        seconds_per_sample=plain.seconds_per_sample + forward_s,
        memory_bytes_in_flight=0.0,
        memory_bytes_fixed=plain.memory_bytes_fixed + kept_bytes,
    )
    return (plain, again) if request.may_recompute else (plain,)


def _edges(graph: ModelGraph, units: UnitGraph, microbatch_size: float) -> Iterator[PiperEdge]:
    unit_of = {name: unit for unit, names in enumerate(units.operators) for name in names}
    sizes: dict[tuple[int, int], float] = {}
    for operator in graph:
        for value in operator.inputs:
            if value in graph.producer:
                pair = unit_of[graph.producer[value]], unit_of[operator.name]
                size = edge_bytes(graph, [value]).forward(microbatch_size)
                sizes[pair] = sizes.get(pair, 0.0) + size
    for (source, target), size in sorted(sizes.items()):
        if source != target:
            yield PiperEdge(source, target, size)
