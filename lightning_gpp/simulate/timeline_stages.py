"""What timelines show of the stages of a program."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner import Plan
from lightning_gpp.planner.operator_names import summarize_operators
from lightning_gpp.schedule import Program
from lightning_gpp.simulate.timeline import TimelineStage


def plan_stages(
    program: Program,
    plan: Plan,
    graph: ModelGraph,
    rank_of_device: Sequence[int] | None = None,
) -> tuple[TimelineStage, ...]:
    """What a timeline shows of the stages of a plan: of each replica, and of the loss.

    Args:
        program: of the plan; its stages count replicas.
        plan: says which operators a stage has.
        graph: names them.
        rank_of_device: rank of every device; each device is the rank of its number by default.
    """
    found = []
    for stage in range(program.num_stages):
        replica, device = program.replica(stage), program.device(stage)
        rank = device if rank_of_device is None else rank_of_device[device]
        if replica.stage == plan.num_stages:
            found.append(TimelineStage(stage, rank, "loss"))
            continue
        operators = plan.stages[replica.stage].operators
        label = summarize_operators(graph, operators)
        if replica.count > 1 or replica.stage != stage:  # the plan's ids do not count replicas
            label = f"{label} ({replica})"
        found.append(TimelineStage(stage, rank, label, operators))
    return tuple(found)
