"""Plans without idle devices.

Who asks for so many devices expects them in use, while the fastest plan of a small model may be one
on fewer of them.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.common.units_of_measure import seconds_text
from lightning_gpp.planner.balanced import balanced
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.graphpipe.place.planner import NAME as GRAPHPIPE
from lightning_gpp.planner.graphpipe.place.planner import search_on_all
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.step_time.evaluate import evaluate_plan
from lightning_gpp.planner.units.units import num_separable

MOST_MICROBATCHES = 4
"""Micro-batches per device that are tried at most; more hardly shorten the step."""


def on_all_devices(plan: Plan, request: PlanRequest) -> Plan:
    """A plan, or where it leaves devices idle the fastest one that uses more.

    Those of ``balanced`` are candidates. For plans of ``graphpipe`` its search begins with them and
    looks at none that leaves devices idle; it is not made as a whole again.

    Args:
        plan: what some planner answered.
        request: the question.
    """
    num_stages = min(request.num_devices, num_separable(request.graph))
    if num_stages <= num_devices_used(plan):
        return plan
    part = replace(request, cluster=request.cluster.first(num_stages))
    plans = [balanced(replace(part, num_microbatches=count)) for count in _counts(part)]
    found = [evaluate_plan(other, request) for other in plans]
    if plan.planner.startswith(GRAPHPIPE):
        better = search_on_all(request, found, num_stages)
        return plan if better is None else better.plan
    fitting = [evaluation for evaluation in found if evaluation.is_feasible]
    if not fitting:
        return plan
    return min(fitting, key=lambda found: (found.step_s, found.peak_memory_bytes)).plan


def why_fuller(fewer: Plan, fuller: Plan, request: PlanRequest) -> str:
    """Why another planner's plan is used."""
    few_s, full_s = (evaluate_plan(plan, request).step_s for plan in (fewer, fuller))
    used = num_devices_used(fewer)
    return (
        f"The plan of {fewer.planner!r} would use {used} of {request.num_devices} devices and is "
        f"predicted to take {seconds_text(few_s)} per step instead of {seconds_text(full_s)}. "
        f"devices={used}, or GraphPipeStrategy(use_all_devices=False), takes it."
    )


def num_devices_used(plan: Plan) -> int:
    """Devices with a stage or a replica of one."""
    return len({device for stage in plan.stages for device in stage.devices})


def _counts(request: PlanRequest) -> list[int]:
    """Numbers of micro-batches to try, of the sizes that a planner may choose: the two largest."""
    counts = [round(request.minibatch_size / size) for size in request.microbatch_sizes]
    most = MOST_MICROBATCHES * request.num_devices
    few = [count for count in counts if count <= most]
    return sorted(few, reverse=True)[:2] or [min(counts)]
