"""Whether the devices' memory is what keeps a plan from being faster."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.common.units_of_measure import bytes_text, percent_text, seconds_text
from lightning_gpp.jobs.search.searched import Searched, search
from lightning_gpp.planner import PLANNERS, PlanEvaluation
from lightning_gpp.planner.plan_to_run import PlanQuestion

WORTH_ASKING = 0.4
"""Micro-batches of twice the size may need twice the memory: below this part of a device's nothing
was refused for its sake."""

SHORTER = 0.999
"""Of the step, for memory to count as what bounds it."""


def memory_limit_note(
    question: PlanQuestion, searched: Searched, limit_s: float | None = None
) -> list[str]:
    """What the same planner finds with unlimited memory; nothing where there is room anyway.

    Args:
        question: that was asked, with the schedule that runs the plan.
        searched: the answer.
        limit_s: seconds of the search.
    """
    evaluation, request = searched.evaluation, question.request
    if evaluation is None or searched.planner not in PLANNERS:
        return []
    if _fullness(evaluation) < WORTH_ASKING:
        return []
    devices = tuple(replace(device, memory_bytes=None) for device in request.cluster.devices)
    unlimited = replace(request, cluster=replace(request.cluster, devices=devices))
    again = search(replace(question, request=unlimited, planner=searched.planner), limit_s)
    found = again.evaluation
    if found is None:
        return [f"Whether memory bounds the step is not known: {again.failure}."]
    if found.step_s > SHORTER * evaluation.step_s:
        return ["Memory does not bound the step: with unlimited memory it is no shorter."]
    saved = percent_text(evaluation.step_s - found.step_s, evaluation.step_s)
    return [
        f"Memory bounds the step: with unlimited memory it would take {seconds_text(found.step_s)}"
        f" ({saved} less), and {bytes_text(found.peak_memory_bytes)} on the fullest device."
    ]


def _fullness(evaluation: PlanEvaluation) -> float:
    """Part of the memory of the fullest device."""
    return max(
        (
            device.memory_bytes / device.limit_bytes
            for device in evaluation.devices
            if device.limit_bytes
        ),
        default=0.0,
    )
