"""Random valid plans for a captured model."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

from helpers.training import Training
from lightning_gpp.capture import capture
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner import Plan, PlanRequest, Stage, validate_plan

MAX_EXTRA_STAGES = 3
MOST_TRIES = 100
"""Of replicas: there are stages that no draw fits."""


def captured_graph(training: Training) -> ModelGraph:
    """The graph of a training's model, captured with one sample of its data."""
    module = training.module()
    args, kwargs = training.example_arguments()
    return capture(module, args, kwargs).graph


def any_plan(request: PlanRequest, choose: random.Random) -> Plan:
    """A random plan for two of the devices or more, with replicas and all; others stay idle.

    Args:
        request: the question.
        choose: makes the choices.
    """
    most = min(request.num_devices, len(request.graph))
    used = choose.sample(range(request.num_devices), choose.randint(min(2, most), most))
    plan = random_plan(
        request.graph,
        num_devices=len(used),
        seed=choose.randrange(1000),
        with_replicas=True,
        num_microbatches=request.num_microbatches or min(4, request.minibatch_size),
    )
    stages = (replace(s, devices=tuple(used[device] for device in s.devices)) for s in plan.stages)
    return replace(plan, stages=tuple(stages), planner="random")


def random_plan(
    graph: ModelGraph,
    *,
    num_devices: int,
    seed: int,
    with_replicas: bool = False,
    num_microbatches: int = 4,
) -> Plan:
    """Cuts a random topological order at random points over all devices.

    Every cut of a topological order gives convex stages in topological order, so all plans
    made here are valid; a device may get several stages that do not touch.

    Args:
        graph: the model.
        num_devices: all get a stage.
        seed: of the choice.
        with_replicas: draw replicas, micro-batches of other sizes, recomputation and chains too.
        num_microbatches: of the plan, if so.

    Raises:
        ValueError: the graph has fewer operators than there are devices.
    """
    choose = random.Random(seed)
    order = _topological_order(graph, choose)
    if len(order) < num_devices:
        raise ValueError(f"{len(order)} operators do not fill {num_devices} devices")
    num_stages = choose.randint(num_devices, min(len(order), num_devices + MAX_EXTRA_STAGES))
    cuts = sorted(choose.sample(range(1, len(order)), num_stages - 1))
    bounds = zip([0, *cuts], [*cuts, len(order)], strict=True)
    devices = list(range(num_devices))
    devices += choose.choices(range(num_devices), k=num_stages - num_devices)
    choose.shuffle(devices)
    plan = Plan(
        tuple(
            Stage(i, tuple(order[start:end]), (devices[i],))
            for i, (start, end) in enumerate(bounds)
        )
    )
    for _ in range(MOST_TRIES if with_replicas else 0):
        other = _with_replicas(plan, graph, num_devices, choose, num_microbatches)
        with contextlib.suppress(ValueError):  # values without samples cannot be cut
            validate_plan(other, graph, num_devices)
            return other
    return plan


def _with_replicas(
    plan: Plan,
    graph: ModelGraph,
    num_devices: int,
    choose: random.Random,
    num_microbatches: int,
) -> Plan:
    """The same stages, where each may get more devices, larger micro-batches, recomputation."""
    stages = []
    multiples = [n for n in range(1, num_microbatches + 1) if num_microbatches % n == 0]
    for stage in plan.stages:
        state = any(graph.operator[name].state for name in stage.operators)
        multiple = choose.choice(multiples)
        counts = [n for n in multiples if multiple % n == 0 and n <= num_devices]
        others = [device for device in range(num_devices) if device not in stage.devices]
        count = 1 if state else choose.choice(counts)
        devices = [*stage.devices, *choose.sample(others, count - 1)]
        recompute = not state and choose.random() < 0.3
        stages.append(Stage(stage.id, stage.operators, tuple(devices), multiple, recompute))
    is_chain = choose.random() < 0.3
    pace = choose.choice([None, 0.0, 0.25, 1.0])
    return Plan(tuple(stages), "manual", num_microbatches, is_chain, pace)


def _topological_order(graph: ModelGraph, choose: random.Random) -> list[str]:
    waiting = {operator.name: set(graph.predecessors[operator.name]) for operator in graph}
    order: list[str] = []
    while waiting:
        ready = sorted(name for name, needs in waiting.items() if not needs)
        name = choose.choice(ready)
        order.append(name)
        del waiting[name]
        for needs in waiting.values():
            needs.discard(name)
    return order
