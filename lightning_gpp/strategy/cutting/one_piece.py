"""What a step costs whose batch is not cut into micro-batches."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.planner import Plan, PlanRequest, evaluate_plan


def one_piece_step_s(plan: Plan, request: PlanRequest) -> float:
    """Predicted seconds of a step in one piece: every stage on its first device, all at once."""
    stages = tuple(
        replace(stage, devices=stage.devices[:1], microbatch_multiple=1, shares=())
        for stage in plan.stages
    )
    whole = replace(plan, stages=stages, num_microbatches=1)
    return evaluate_plan(whole, replace(request, num_microbatches=1)).step_s
