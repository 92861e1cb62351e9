"""A plan as text: what is where, what it takes, and a picture of the stage graph.

Every number is of :func:`~lightning_gpp.planner.step_time.evaluate.evaluate_plan`, by which plans
are compared too.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.common.text_table import text_table, wrapped
from lightning_gpp.common.units_of_measure import (
    bytes_text,
    count_text,
    devices_text,
    indices_text,
    number_text,
    percent_text,
    samples_text,
    seconds_text,
)
from lightning_gpp.cost import ANY_DEVICE
from lightning_gpp.graph.operator_names import summarize_operators
from lightning_gpp.planner.base import ADAM_VALUES, PlanRequest
from lightning_gpp.planner.does_not_fit import HOLDS_ALL, HOLDS_FEW
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.step_time.evaluate import (
    PlanEvaluation,
    StageEvaluation,
    evaluate_plan,
    plan_devices,
)
from lightning_gpp.reports.plan.bounds import describe_bounds
from lightning_gpp.reports.plan.describe_shares import describe_shares
from lightning_gpp.reports.plan.message_sizes import sized_stages
from lightning_gpp.reports.plan.picture_text import draw_stage_graph

LABEL_WIDTH = 60
"""Characters for the operators in a box of the picture."""


def describe_plan(evaluation: PlanEvaluation, request: PlanRequest, *, max_width: int = 100) -> str:
    """The stages as a table, what bounds the step, and a picture of the stage graph.

    Args:
        evaluation: of a valid plan.
        request: the question that the plan answers.
        max_width: columns of the terminal.
    """
    parts = (
        describe_head(evaluation, request, max_width=max_width),
        describe_stages(evaluation, request, max_width=max_width),
        describe_shares(evaluation, max_width=max_width),
        describe_bounds(evaluation, max_width=max_width),
        describe_columns(request, max_width=max_width),
        describe_graph(evaluation, request, max_width=max_width),
    )
    return "\n\n".join(part for part in parts if part)


def describe_head(evaluation: PlanEvaluation, request: PlanRequest, *, max_width: int = 100) -> str:
    """What the plan is, how fast, and what it holds with either schedule."""
    plan = evaluation.plan
    what = describe_what(evaluation, request)
    in_a_row = request.num_minibatches
    step = (
        f"Predicted step: {seconds_text(evaluation.minibatch_s)} for "
        f"{count_text(request.minibatch_size // in_a_row, 'sample')}, "
        f"{number_text(evaluation.throughput)} samples/s"
    )
    if in_a_row > 1:
        step += f" (the mean of {in_a_row} that overlap, from an empty pipeline to an empty one)"
    return wrapped([what, step, describe_held(plan, request)], max_width)


def describe_what(evaluation: PlanEvaluation, request: PlanRequest) -> str:
    """Stages, devices, micro-batches and schedule in a line."""
    plan = evaluation.plan
    has_loss = sized_stages(plan, request).num_stages > plan.num_stages
    return (
        f"Plan {plan.planner!r}: {count_text(plan.num_stages, 'stage')} on "
        f"{count_text(len(evaluation.devices), 'device')}, depth {evaluation.depth}"
        f"{' with the loss' if has_loss else ''}, {describe_microbatches(evaluation, request)}, "
        f"schedule {request.schedule}"
    )


def describe_held(plan: Plan, request: PlanRequest) -> str:
    """What the fullest device holds with either schedule, whichever of them runs the plan.

    Where the pipeline does not drain: how much, and how many versions of the parameters.
    """
    if request.num_minibatches > 1:
        stages = evaluate_plan(plan, request).stages
        copies = request.held_versions
        versions = [copies.of(stage.in_flight) for stage in stages]
        count = copies.per_update
        many = f", with updates of {count} mini-batches" if count > 1 else ""
        return (
            f"Memory: {bytes_text(_fullest_bytes(plan, request))} on the fullest device; versions "
            f"of the parameters by stage: {', '.join(map(str, versions))}{many}"
        )
    held = [
        f"{schedule} {bytes_text(_fullest_bytes(plan, replace(request, schedule=schedule)))}"
        for schedule in (HOLDS_ALL, HOLDS_FEW)
    ]
    return f"Memory by schedule: {', '.join(held)} on the fullest device"


def _fullest_bytes(plan: Plan, request: PlanRequest) -> int:
    return max(device.memory_bytes for device in plan_devices(plan, request))


def describe_microbatches(evaluation: PlanEvaluation, request: PlanRequest) -> str:
    """How many micro-batches stages take, and of how many samples."""
    sizes = [found.microbatch_size for found in evaluation.stages]
    least, most = min(sizes), max(sizes)
    if least < most:
        return f"micro-batches of {samples_text(least)} to {samples_text(most)}"
    count = round(evaluation.minibatch_size / least)
    if request.num_minibatches > 1:
        return f"mini-batches of {samples_text(least)} that are not cut"
    return f"{count_text(count, 'micro-batch')} of {samples_text(least)}"


def describe_stages(
    evaluation: PlanEvaluation, request: PlanRequest, *, max_width: int = 100
) -> str:
    """A row for every stage: what it holds and what it takes."""
    header = [
        *("stage", "device", "operators", "micro-\nbatch", "in\nflight"),
        *("compute", "messages", "per\nsample", "load", "memory"),
    ]
    slowest_s = evaluation.bottleneck.seconds_per_sample
    rows = [
        [
            str(found.stage.id),
            indices_text(found.stage.devices),
            summarize_operators(request.graph, found.stage.operators),
            f"{samples_text(found.microbatch_size)}{' r' if found.stage.recompute else ''}",
            str(found.in_flight),
            seconds_text(found.compute_s),
            seconds_text(found.communication_s),
            seconds_text(found.seconds_per_sample),
            percent_text(found.seconds_per_sample, slowest_s),
            bytes_text(found.memory.total_bytes),
        ]
        for found in evaluation.stages
    ]
    return text_table(header, rows, left=["operators"], flexible="operators", max_width=max_width)


def describe_columns(request: PlanRequest, *, max_width: int = 100) -> str:
    """What the columns of the stages mean, and where the seconds are from."""
    optimizer = count_text(request.optimizer_values, "value")
    if request.optimizer_values == ADAM_VALUES:
        optimizer = f"Adam: {optimizer}"
    sentences = (
        f"Compute: forward and backward of one micro-batch ({describe_source(request)}).",
        "Messages: what a replica sends meanwhile.",
        "Per sample: the longer of both, and sums of gradients. Load: of the slowest stage's.",
        f"Memory: parameters, gradients, optimizer state ({optimizer} per parameter) and "
        "activations in flight, on each device. r: activations are computed again.",
        "Below, arrows have the bytes of a message, which is of one micro-batch.",
    )
    return wrapped(sentences, max_width)


def describe_source(request: PlanRequest) -> str:
    """Where the costs are from."""
    kinds = dict.fromkeys(request.costs.kind_for(kind) for kind in request.cluster.kinds)
    if request.is_estimated:
        return "estimated, not measured"
    if ANY_DEVICE in kinds:
        return "from the published profile"
    return f"measured on {', '.join(kinds)}"


def describe_graph(
    evaluation: PlanEvaluation, request: PlanRequest, *, max_width: int = 100
) -> str:
    """A picture of the stage graph, with the bytes of a message at every edge."""
    slowest_s = evaluation.bottleneck.seconds_per_sample
    labels = [_label(found, request, slowest_s) for found in evaluation.stages]
    stages = sized_stages(evaluation.plan, request)
    if stages.num_stages > len(labels):
        labels.append(f"loss · device {evaluation.stages[-1].stage.devices[0]}")
    return draw_stage_graph(stages, labels, max_width=max_width)


def _label(found: StageEvaluation, request: PlanRequest, slowest_s: float) -> str:
    operators = summarize_operators(request.graph, found.stage.operators)
    return "\n".join(
        (
            f"stage {found.stage.id} · {devices_text(found.stage.devices)}",
            operators if len(operators) <= LABEL_WIDTH else f"{operators[: LABEL_WIDTH - 1]}…",
            f"{bytes_text(found.memory.total_bytes)} · "
            f"{percent_text(found.seconds_per_sample, slowest_s)} load",
        )
    )
