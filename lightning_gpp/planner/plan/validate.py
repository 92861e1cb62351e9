"""Checks a plan against the model and the devices, before anything runs."""

from __future__ import annotations

from lightning_gpp.graph import FEED, ModelGraph, StageEdge
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.plan.plan_graph import PlanGraph, plan_graph
from lightning_gpp.planner.units.units import output_makers, state_holders


def validate_plan(plan: Plan, graph: ModelGraph, num_devices: int) -> PlanGraph:
    """Checks that a plan can run.

    - Every operator is in exactly one stage, and stages are convex and in topological order.
    - Operators that change the same module state are in one stage, without replicas and without
      recomputation.
    - The last stage makes an output of the model, if an operator does.
    - The devices of the stages exist.
    - Along edges one micro-batch multiple divides the other, and where the two sides (or their
      replicas) take different numbers of samples, everything that crosses can be split by samples.

    Args:
        plan: the plan.
        graph: the model.
        num_devices: how many devices there are.

    Returns:
        The stages as they run.

    Raises:
        ValueError: a check fails; the text says what to change.
    """
    _check_devices(plan, num_devices)
    placed = plan_graph(plan, graph)
    _check_state(plan, graph)
    _check_last_stage(plan, graph)
    for edge in placed.stages.edges:
        _check_multiples(placed, edge)
    check_cuts(placed, graph)
    return placed


def check_cuts(placed: PlanGraph, graph: ModelGraph) -> None:
    """Checks that values between stages can be cut wherever their two sides take other samples.

    Args:
        placed: the stages as they run.
        graph: the model.

    Raises:
        ValueError: a value cannot be cut; the text says what to change.
    """
    for edge in placed.stages.edges:
        _check_cut(placed, graph, edge)


def _check_devices(plan: Plan, num_devices: int) -> None:
    for stage in plan.stages:
        if wrong := [device for device in stage.devices if not 0 <= device < num_devices]:
            raise ValueError(
                f"stage {stage.id} is on device {wrong[0]}, but there are {num_devices} devices "
                f"(0 … {num_devices - 1}); change the plan or the number of devices"
            )


def _check_state(plan: Plan, graph: ModelGraph) -> None:
    stage_of = {name: stage.id for stage in plan.stages for name in stage.operators}
    for state, operators in state_holders(graph).items():
        stages = sorted({stage_of[name] for name in operators})
        if len(stages) > 1:
            raise ValueError(
                f"operators {', '.join(operators)} all change {state!r}, but are in stages "
                f"{stages}; put them in one stage"
            )
        _check_changes(plan.stages[stages[0]], operators[0], state)


def _check_changes(stage: Stage, operator: str, state: str) -> None:
    """What a forward changes (running statistics) has to change once per micro-batch, in order."""
    if len(stage.devices) > 1:
        raise ValueError(
            f"stage {stage.id} has {len(stage.devices)} replicas, but its operator {operator!r} "
            f"changes {state!r}, which replicas would change differently; give the stage one "
            "device, or put the operator into a stage of its own"
        )
    if stage.recompute:
        raise ValueError(
            f"stage {stage.id} recomputes its forward, but its operator {operator!r} changes "
            f"{state!r} in every forward, so twice; set recompute to false, or put the operator "
            "into a stage of its own"
        )


def _check_last_stage(plan: Plan, graph: ModelGraph) -> None:
    makers = output_makers(graph)
    last = plan.stages[-1]
    if makers and not set(makers) & set(last.operators):
        raise ValueError(
            f"the last stage ({last.id}) makes no output of the model, but the loss is computed "
            f"there; put one of {', '.join(makers)} into it"
        )


def _check_multiples(placed: PlanGraph, edge: StageEdge) -> None:
    if edge.source == FEED:
        return
    source, target = placed.multiples[edge.source], placed.multiples[edge.target]
    if max(source, target) % min(source, target):
        raise ValueError(
            f"{_between(placed, edge)}: one microbatch_multiple must divide the other where values "
            "are handed on"
        )


def _check_cut(placed: PlanGraph, graph: ModelGraph, edge: StageEdge) -> None:
    source, target = (placed.replica_multiples(end) for end in (edge.source, edge.target))
    if source == target or len({*source, *target}) == 1:
        return
    for name in edge.values:
        if not graph.values[name].is_cuttable:
            raise ValueError(
                f"{name!r} goes from {_between(placed, edge)}, but cannot be split or joined by "
                "samples; let both take the same samples: the same "
                "microbatch_multiple and as many devices"
            )


def _between(placed: PlanGraph, edge: StageEdge) -> str:
    ends = (_end(placed, stage) for stage in (edge.source, edge.target))
    return " to ".join(ends)


def _end(placed: PlanGraph, stage: int) -> str:
    name = "the feed" if stage == FEED else f"stage {stage}"
    count = 1 if stage == FEED else len(placed.devices[stage])
    replicas = f" on {count} devices" if count > 1 else ""
    return f"{name} (microbatch_multiple {placed.multiples[stage]}{replicas})"
