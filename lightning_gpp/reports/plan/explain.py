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
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.step_time.evaluate import DeviceTime, PlanEvaluation, device_times

EQUAL = 1e-6
"""Differences below this part of a number are none."""


LEAST_SHOWN = 0.005
"""Parts of a step below this would read 0 %."""

LEGEND = (
    "Waits: for its first input (start), for inputs and for gradients of other stages after that, "
    "and after its own work for the end of the step.",
    "Weights: parameters, gradients and optimizer state. Activations: of the micro-batches in "
    "flight; on the device of the loss also the batch, the outputs and their gradients.",
)
LEGEND_OF_SUMS = "Sums: adding up the gradients of replicas behind its last backward."


def describe_devices(
    evaluation: PlanEvaluation, request: PlanRequest, *, max_width: int = 100
) -> str:
    """What every device does and waits for in a step, the parts of its memory, and what that means.

    Neighbours of which everything reads the same share a row; narrow terminals get two tables.
    """
    times = device_times(evaluation, request)
    has_sums = any(time.reduce_s > LEAST_SHOWN * evaluation.step_s for time in times)
    rows = joined_rows([_device_row(time, evaluation, has_sums=has_sums) for time in times])
    header = ["device", "stage", "computes", *(["sums"] if has_sums else []), "waits"]
    header += ["for\nstart", "\ninputs", "gradi-\nents", "\nend"]
    middle = len(header)
    header += ["weights", "acti-\nvations", "of its\nmemory"]
    parts = [text_table(header, rows)]
    if max(map(len, parts[0].split("\n"))) > max_width:
        columns = [*range(middle)], [0, 1, *range(middle, len(header))]
        parts = [
            text_table([header[i] for i in each], [[row[i] for i in each] for row in rows])
            for each in columns
        ]
    legend = [LEGEND_OF_SUMS, *LEGEND] if has_sums else LEGEND
    return "\n\n".join([*parts, wrapped(legend, max_width)])


def _device_row(time: DeviceTime, evaluation: PlanEvaluation, *, has_sums: bool) -> list[str]:
    step_s = evaluation.step_s
    device = next(found for found in evaluation.devices if found.device == time.device)
    own = [evaluation.stages[stage].on(time.device).memory for stage in time.stages]
    weights, limit = sum(memory.fixed_bytes for memory in own), device.limit_bytes
    waits = (time.fill_s, time.inputs_s, time.gradients_s, time.end_s)
    return [
        str(time.device),
        indices_text(time.stages),
        f"{seconds_text(time.compute_s)} {percent_text(time.compute_s, step_s):>4}",
        *([percent_text(time.reduce_s, step_s)] if has_sums else []),
        f"{seconds_text(time.wait_s)} {percent_text(time.wait_s, step_s):>4}",
        *(percent_text(part_s, step_s) for part_s in waits),
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
