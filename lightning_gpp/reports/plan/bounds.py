"""What bounds a step: a stage's compute or messages, warm-up and drain; and how full memory is."""

from __future__ import annotations

from lightning_gpp.common.text_table import wrapped
from lightning_gpp.common.units_of_measure import (
    bytes_text,
    devices_text,
    percent_text,
    samples_text,
    seconds_text,
    stages_text,
)
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation


def describe_bounds(evaluation: PlanEvaluation, *, max_width: int = 100) -> str:
    """The stage that sets the pace, what the pipeline's ends add, and how full the memory is."""
    return wrapped([_pace(evaluation), _ends(evaluation), _memory(evaluation)], max_width)


def _pace(evaluation: PlanEvaluation) -> str:
    pace, stage = evaluation.bottlenecks, evaluation.pacemaker
    parts = [
        f"compute {seconds_text(stage.compute_s)}",
        f"messages {seconds_text(stage.communication_s)}",
    ]
    first, second = parts if stage.bound == "compute" else reversed(parts)
    text = (
        f"Pace: stage {stage.stage.id} ({devices_text(stage.stage.devices)}) sets it by "
        f"{stage.bound}, {seconds_text(stage.seconds_per_sample)} per sample: {first} per "
        f"micro-batch of {samples_text(stage.microbatch_size)}, {second} meanwhile"
    )
    if stage.reduce_s:
        share = percent_text(stage.reduce_s, evaluation.step_s)
        text += f"; summing its gradients {seconds_text(stage.reduce_s)} ({share} of the step)"
    if evaluation.seconds_per_sample > stage.seconds_per_sample:
        whole = seconds_text(evaluation.seconds_per_sample)
        text += f"; {stages_text([found.stage.id for found in pace])} together {whole} per sample"
    elif len(pace) > 1:
        text += (
            f"; {stages_text([found.stage.id for found in pace if found is not stage])} likewise"
        )
    return f"{text}."


def _ends(evaluation: PlanEvaluation) -> str:
    steady_s = evaluation.minibatch_size * evaluation.seconds_per_sample
    rest_s = max(0.0, evaluation.step_s - steady_s)
    step, steady = seconds_text(evaluation.step_s), seconds_text(steady_s)
    if steady_s > evaluation.step_s and step != steady:
        return (
            f"Step: {step}, less than {steady} at that pace: messages and sums of gradients lie "
            "beside the work of the device's other stages."
        )
    return (
        f"Step: {steady} at that pace, and {seconds_text(rest_s)} "
        f"({percent_text(rest_s, evaluation.step_s)}) to fill and to empty the pipeline."
    )


LEAST_SHOWN = 0.01
"""Smaller parts of a device's memory are not named."""


def _memory(evaluation: PlanEvaluation) -> str:
    fullest = max(evaluation.devices, key=lambda device: device.memory_bytes)
    text = f"Memory: device {fullest.device} is the fullest, {bytes_text(fullest.memory_bytes)}"
    if fullest.step_bytes > LEAST_SHOWN * fullest.memory_bytes:
        text += f" ({bytes_text(fullest.step_bytes)} of it batch, outputs and their gradients)"
    if fullest.limit_bytes is None:
        return f"{text}; its limit is not known."
    limit = bytes_text(fullest.limit_bytes)
    share = percent_text(fullest.memory_bytes, fullest.limit_bytes)
    if fullest.fits:
        return f"{text} of {limit} ({share})."
    return f"{text}, but has {limit} ({share}): the plan does not fit."
