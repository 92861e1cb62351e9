"""What timelines show of the stages of a pipeline."""

from __future__ import annotations

from lightning_gpp.schedule import Program
from lightning_gpp.simulate import TimelineStage
from lightning_gpp.simulate.timeline.stages import plan_stages
from lightning_gpp.strategy.pipeline import Pipeline


def timeline_stages(pipeline: Pipeline, program: Program) -> tuple[TimelineStage, ...]:
    """What a timeline shows of the stages of a program."""
    return plan_stages(program, pipeline.plan, pipeline.captured.graph, pipeline.rank_of_device)
