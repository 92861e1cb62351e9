"""Why other plans lost."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_gpp.common.text_table import text_table
from lightning_gpp.common.units_of_measure import bytes_text, samples_text, seconds_text
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation

EQUAL = 1e-6
"""Differences below this part of a number are none."""


def describe_alternatives(
    best: PlanEvaluation, others: Mapping[str, PlanEvaluation], *, max_width: int = 100
) -> str:
    """Other plans, and why each of them lost.

    Args:
        best: the plan that was chosen.
        others: name -> what the plan would do.
        max_width: columns of the terminal.
    """
    header = ["plan", "stages", "depth", "micro-\nbatch", "step", "", "memory", "why not"]
    rows = []
    for name, found in others.items():
        sizes = {stage.microbatch_size for stage in found.stages}
        rows.append(
            [
                *(name, str(found.plan.num_stages), str(found.depth)),
                "-".join(samples_text(size) for size in sorted({min(sizes), max(sizes)})),
                seconds_text(found.minibatch_s),
                f"{round(100 * (found.step_s / best.step_s - 1)):+d} %",
                bytes_text(found.peak_memory_bytes),
                why_it_lost(best, found),
            ]
        )
    return text_table(
        header, rows, left=["plan", "why not"], flexible="why not", max_width=max_width
    )


def why_it_lost(best: PlanEvaluation, found: PlanEvaluation) -> str:
    """What first sets a plan back: it does not fit, its pace is slower, its ends take longer."""
    if not found.is_feasible:
        return does_not_fit(found)
    if found.step_s < best.step_s * (1 - EQUAL):
        if len(found.devices) < len(best.devices):
            return f"faster, but uses {len(found.devices)} of {len(best.devices)} devices"
        more = len(found.stages) > len(best.stages)
        return "faster, but has more stages" if more else "faster: the planner did not find it"
    if found.step_s <= best.step_s * (1 + EQUAL):
        return "same step"
    slower_s = found.minibatch_size * (found.seconds_per_sample - best.seconds_per_sample)
    if slower_s > (found.step_s - best.step_s) / 2:
        stage = found.bottleneck
        return (
            f"stage {stage.stage.id} takes {seconds_text(stage.seconds_per_sample)} per sample "
            f"({stage.bound}), not {seconds_text(best.bottleneck.seconds_per_sample)}"
        )
    ends, others = (
        seconds_text(one.step_s - one.minibatch_size * one.seconds_per_sample)
        for one in (found, best)
    )
    return f"{ends} to fill and drain, not {others}"


def does_not_fit(found: PlanEvaluation) -> str:
    """Which device lacks memory, for a plan that is not feasible."""
    device = max(found.devices, key=lambda d: d.memory_bytes - (d.limit_bytes or d.memory_bytes))
    return (
        f"device {device.device} needs {bytes_text(device.memory_bytes)} of "
        f"{bytes_text(device.limit_bytes or 0)}"
    )
