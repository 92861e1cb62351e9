"""Why a plan is as fast as it is: what every device does and waits for, and what else was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gpp.common.text_table import text_table, wrapped
from lightning_gpp.common.units_of_measure import (
    bytes_text,
    indices_text,
    percent_text,
    samples_text,
    seconds_text,
)
from lightning_gpp.planner.step_time.evaluate import DeviceEvaluation, PlanEvaluation

EQUAL = 1e-6
"""Differences below this part of a number are none."""


LEGEND = (
    "Weights: parameters, gradients and optimizer state. Activations: of the micro-batches in "
    "flight; on the device of the loss also the batch, the outputs and their gradients.",
)


def describe_devices(evaluation: PlanEvaluation, *, max_width: int = 100) -> str:
    """What every device computes in a step, how long it waits, and the parts of its memory.

    Neighbours of which everything reads the same share a row.
    """
    header = ["device", "stage", "computes", "waits", "weights", "acti-\nvations", "of its\nmemory"]
    rows = joined_rows([_device_row(device, evaluation) for device in evaluation.devices])
    return f"{text_table(header, rows)}\n\n{wrapped(LEGEND, max_width)}"


def _device_row(device: DeviceEvaluation, evaluation: PlanEvaluation) -> list[str]:
    own = [one for one in evaluation.stages if device.device in one.stage.devices]
    weights = sum(one.on(device.device).memory.fixed_bytes for one in own)
    step_s, limit = evaluation.step_s, device.limit_bytes
    waits_s = max(0.0, step_s - device.busy_s)
    return [
        str(device.device),
        indices_text([one.stage.id for one in own]),
        *(f"{seconds_text(s)} {percent_text(s, step_s):>4}" for s in (device.busy_s, waits_s)),
        bytes_text(weights),
        bytes_text(device.memory_bytes - weights),
        percent_text(device.memory_bytes, limit) if limit is not None else "",
    ]


def joined_rows(rows: Sequence[list[str]]) -> list[list[str]]:
    """Neighbouring rows of which all but the device (the first cell) is the same, made one."""
    groups: list[tuple[list[str], list[int]]] = []
    for row in rows:
        if groups and groups[-1][0][1:] == row[1:]:
            groups[-1][1].append(int(row[0]))
        else:
            groups.append((row, [int(row[0])]))
    return [[indices_text(devices), *row[1:]] for row, devices in groups]


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another answer to the same question.

    Attributes:
        name: what it is, or which planner made it.
        evaluation: what it would do; None where there is no plan.
        failure: why there is none.
    """

    name: str
    evaluation: PlanEvaluation | None = None
    failure: str = ""


def describe_alternatives(
    best: PlanEvaluation, others: Sequence[Alternative], *, max_width: int = 100
) -> str:
    """Other plans, and why each of them lost."""
    header = ["plan", "stages", "depth", "micro-\nbatch", "step", "", "memory", "why not"]
    rows = []
    for other in others:
        numbers, found = [""] * 6, other.evaluation
        if found is not None:
            sizes = {stage.microbatch_size for stage in found.stages}
            numbers = [
                str(found.plan.num_stages),
                str(found.depth),
                "-".join(samples_text(size) for size in sorted({min(sizes), max(sizes)})),
                seconds_text(found.minibatch_s),
                f"{round(100 * (found.step_s / best.step_s - 1)):+d} %",
                bytes_text(found.peak_memory_bytes),
            ]
        rows.append([other.name, *numbers, why_it_lost(best, other)])
    return text_table(
        header, rows, left=["plan", "why not"], flexible="why not", max_width=max_width
    )


def why_it_lost(best: PlanEvaluation, other: Alternative) -> str:
    """What first sets it back: no plan, no memory, a slower pace, longer ends, more memory."""
    found = other.evaluation
    if found is None:
        return other.failure
    if not found.is_feasible:
        return does_not_fit(found)
    gain = 1 - found.step_s / best.step_s
    if gain > EQUAL:
        if len(found.devices) < len(best.devices):
            return f"faster, but uses {len(found.devices)} of {len(best.devices)} devices"
        if len(found.stages) > len(best.stages):
            return f"faster by {100 * gain:.1f} %, but more stages"
        return "it is faster: the planner did not find it"
    if gain >= -EQUAL:
        more_bytes = found.peak_memory_bytes - best.peak_memory_bytes
        if more_bytes < 0:
            return "same step, less memory: the planner did not find it"
        return "same step, more memory" if more_bytes else "same step and memory"
    slower_s = found.minibatch_size * (found.seconds_per_sample - best.seconds_per_sample)
    if slower_s > (found.step_s - best.step_s) / 2:
        return _slower_pace(best, found)
    pace = "same" if abs(slower_s) < EQUAL * best.step_s else "similar"
    pace = "faster" if slower_s < -EQUAL * best.step_s else pace
    ends, others = (
        seconds_text(one.step_s - one.minibatch_size * one.seconds_per_sample)
        for one in (found, best)
    )
    largest, best_largest = (max(s.microbatch_size for s in one.stages) for one in (found, best))
    reasons = ["deeper"] if found.depth > best.depth else []
    reasons += ["larger micro-batches"] if largest > best_largest else []
    why = f" ({', '.join(reasons)})" if reasons else ""
    return f"{pace} pace, but {ends} to fill and empty, not {others}{why}"


def _slower_pace(best: PlanEvaluation, found: PlanEvaluation) -> str:
    stage = found.bottleneck
    text = (
        f"stage {stage.stage.id} takes {seconds_text(stage.seconds_per_sample)} per sample "
        f"({stage.bound}), not {seconds_text(best.bottleneck.seconds_per_sample)}"
    )
    share = stage.reduce_s / found.minibatch_size / stage.seconds_per_sample
    if share > 0.1:
        text += f"; {100 * share:.0f} % of it sums gradients"
    return text


def does_not_fit(found: PlanEvaluation) -> str:
    """Which device lacks memory, for a plan that is not feasible."""
    device = max(found.devices, key=lambda d: d.memory_bytes - (d.limit_bytes or d.memory_bytes))
    return (
        f"device {device.device} needs {bytes_text(device.memory_bytes)} of "
        f"{bytes_text(device.limit_bytes or 0)}"
    )
