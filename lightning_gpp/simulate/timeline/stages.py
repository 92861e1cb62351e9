"""What timelines show of the stages of a plan's program: of each replica, and of the loss."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.graph import ModelGraph
from lightning_gpp.graph.operator_names import summarize_operators
from lightning_gpp.planner import Plan
from lightning_gpp.schedule import Program
from lightning_gpp.simulate.timeline.timeline import LOSS, TimelineStage


def plan_stages(
    program: Program, plan: Plan, graph: ModelGraph, rank_of_device: Sequence[int]
) -> tuple[TimelineStage, ...]:
    """The stages of a program with the operators that they hold.

    Args:
        program: of the plan.
        plan: stages on devices.
        graph: the model.
        rank_of_device: rank of every device.
    """
    return tuple(
        _stage(program, plan, graph, stage, rank_of_device[program.device(stage)])
        for stage in range(program.num_stages)
    )


def _stage(program: Program, plan: Plan, graph: ModelGraph, id: int, rank: int) -> TimelineStage:
    replica = program.replica(id)
    if replica.stage == plan.num_stages:
        return TimelineStage(id, rank, name=LOSS)
    operators = plan.stages[replica.stage].operators
    name = str(replica.stage)
    if replica.count > 1:
        name = f"{name}.{replica.index}"
    return TimelineStage(id, rank, summarize_operators(graph, operators), operators, name)
