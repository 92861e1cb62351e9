"""What timelines show of the stages of a pipeline."""

from __future__ import annotations

from lightning_gpp.planner.operator_names import summarize_operators
from lightning_gpp.schedule import Replica
from lightning_gpp.simulate import TimelineStage
from lightning_gpp.strategy.pipeline import Pipeline


def timeline_stages(pipeline: Pipeline) -> tuple[TimelineStage, ...]:
    """What a timeline shows of the stages of the last step: of each replica, and of the loss."""
    program = pipeline.last_trained
    assert program is not None, "no step has been run"
    return tuple(
        _timeline_stage(pipeline, stage, program.replica(stage), program.device(stage))
        for stage in range(program.num_stages)
    )


def _timeline_stage(pipeline: Pipeline, id: int, replica: Replica, device: int) -> TimelineStage:
    plan, graph = pipeline.plan, pipeline.captured.graph
    is_loss = replica.stage == plan.num_stages
    operators = () if is_loss else plan.stages[replica.stage].operators
    label = "loss" if is_loss else summarize_operators(graph, operators)
    if replica.count > 1 or replica.stage != id:  # ids count replicas, those of the plan do not
        label = f"{label} ({replica})" if not is_loss else label
    return TimelineStage(id, pipeline.rank_of_device[device], label, operators)
