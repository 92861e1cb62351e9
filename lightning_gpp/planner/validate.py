"""Checks a plan against the model and the devices, before anything runs."""

from __future__ import annotations

from lightning_gpp.graph import FEED, ModelGraph, StageEdge, StageGraph, stage_graph
from lightning_gpp.planner.plan import Plan
from lightning_gpp.planner.units import output_makers, state_holders


def validate_plan(plan: Plan, graph: ModelGraph, num_devices: int) -> StageGraph:
    """Checks that a plan can run.

    - Every operator is in exactly one stage, and stages are convex and in topological order.
    - Operators that change the same module state are in one stage.
    - The last stage makes an output of the model, if an operator does.
    - Stages are on one device each, and these exist.
    - Along edges one micro-batch multiple divides the other, and where they differ every tensor
      that crosses can be split by samples.

    Args:
        plan: the plan.
        graph: the model.
        num_devices: how many devices there are.

    Returns:
        The stage graph of the plan.

    Raises:
        ValueError: a check fails; the text says what to change.
    """
    _check_devices(plan, num_devices)
    stages = stage_graph(graph, plan.stage_operators)
    _check_state(plan, graph)
    _check_last_stage(plan, graph)
    for edge in stages.edges:
        _check_multiples(plan, graph, edge)
    return stages


def _check_devices(plan: Plan, num_devices: int) -> None:
    for stage in plan.stages:
        if wrong := [device for device in stage.devices if not 0 <= device < num_devices]:
            raise ValueError(
                f"stage {stage.id} is on device {wrong[0]}, but there are {num_devices} devices "
                f"(0 … {num_devices - 1}); change the plan or the number of devices"
            )
        if len(stage.devices) > 1:
            raise ValueError(
                f"stage {stage.id} is on devices {list(stage.devices)}: replicas of a stage "
                "cannot run yet; give every stage one device"
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


def _check_last_stage(plan: Plan, graph: ModelGraph) -> None:
    makers = output_makers(graph)
    last = plan.stages[-1]
    if makers and not set(makers) & set(last.operators):
        raise ValueError(
            f"the last stage ({last.id}) makes no output of the model, but the loss is computed "
            f"there; put one of {', '.join(makers)} into it"
        )


def _check_multiples(plan: Plan, graph: ModelGraph, edge: StageEdge) -> None:
    # The feed goes at the pace of the loss, that is, of the last stage.
    source = plan.stages[edge.source if edge.source != FEED else -1].microbatch_multiple
    target = plan.stages[edge.target].microbatch_multiple
    if source == target:
        return
    name = "the feed" if edge.source == FEED else f"stage {edge.source}"
    between = f"{name} (microbatch_multiple {source}) to stage {edge.target} ({target})"
    if edge.source != FEED and max(source, target) % min(source, target):
        raise ValueError(
            f"{between}: one microbatch_multiple must divide the other where values are handed on"
        )
    for value in edge.values:
        if any(spec.batch_dim is None for spec in graph.values[value].tensors):
            raise ValueError(
                f"{value!r} goes from {between}, but has no dimension of samples by which it "
                "could be split or joined; give both the same microbatch_multiple"
            )
