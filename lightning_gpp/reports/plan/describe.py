"""A plan as text: its stages, their times, and the bottleneck.

Every number is of :func:`~lightning_gpp.planner.step_time.evaluate.evaluate_plan`, by which plans
are compared too.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

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
    stages_text,
)
from lightning_gpp.cost import ANY_DEVICE
from lightning_gpp.graph import FEED, ModelGraph, StageGraph, Value
from lightning_gpp.graph.operator_names import summarize_operators
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.plan.plan_graph import plan_graph
from lightning_gpp.planner.request_tables import edge_bytes
from lightning_gpp.planner.step_time.evaluate import (
    PlanEvaluation,
    StageEvaluation,
    evaluate_plan,
)
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches


def describe_plan(evaluation: PlanEvaluation, request: PlanRequest, *, max_width: int = 100) -> str:
    """The stages as a table, and what bounds the step.

    Args:
        evaluation: of a valid plan.
        request: the question that the plan answers.
        max_width: columns of the terminal.
    """
    parts = (
        describe_head(evaluation, request, max_width=max_width),
        describe_stages(evaluation, request, max_width=max_width),
        describe_bounds(evaluation, request, max_width=max_width),
        wrapped(_columns(evaluation, request), max_width),
    )
    return "\n\n".join(parts)


def describe_head(evaluation: PlanEvaluation, request: PlanRequest, *, max_width: int = 100) -> str:
    """The first lines about a plan: what it is, and how fast."""
    in_a_row = request.num_minibatches
    step = (
        f"Predicted step: {seconds_text(evaluation.minibatch_s)} for "
        f"{count_text(request.minibatch_size // in_a_row, 'sample')}, "
        f"{number_text(evaluation.throughput)} samples/s"
    )
    if request.graph.staying:
        step = step.replace("samples", "vertices")
    if in_a_row > 1:
        step += f" (the mean of {in_a_row} that overlap, from an empty pipeline to an empty one)"
    held = [_held(evaluation.plan, request)] if in_a_row > 1 else []
    return wrapped([describe_what(evaluation, request), step, *held], max_width)


def describe_what(evaluation: PlanEvaluation, request: PlanRequest) -> str:
    """Stages, devices, micro-batches and schedule in a line."""
    plan, sizes = evaluation.plan, [found.microbatch_size for found in evaluation.stages]
    least, most = samples_text(min(sizes)), samples_text(max(sizes))
    if min(sizes) < max(sizes):
        batches = f"micro-batches of {least} to {most}"
    elif request.num_minibatches > 1:
        batches = f"mini-batches of {least} that are not cut"
    else:
        count = round(evaluation.minibatch_size / sizes[0])
        batches = f"{count_text(count, 'micro-batch')} of {least}"
    has_loss = plan_graph(plan, request.graph).stages.num_stages > plan.num_stages
    schedule = request.schedule.removesuffix("-reversed")
    return (
        f"Plan {plan.planner!r}: {count_text(plan.num_stages, 'stage')} on "
        f"{count_text(len(evaluation.devices), 'device')}, depth {evaluation.depth}"
        f"{' with the loss' if has_loss else ''}, {batches}, schedule {schedule}"
    )


def _held(plan: Plan, request: PlanRequest) -> str:
    """How many versions of the parameters stages hold, where the pipeline does not drain."""
    copies = request.held_versions
    versions = [str(copies.of(s.in_flight)) for s in evaluate_plan(plan, request).stages]
    count = copies.per_update
    many = f", with updates of {count} mini-batches" if count > 1 else ""
    return f"Versions of the parameters by stage: {', '.join(versions)}{many}"


def describe_stages(
    evaluation: PlanEvaluation, request: PlanRequest, *, max_width: int = 100
) -> str:
    """A row for every stage: what it holds and what it takes."""
    header = [
        *("stage", "device", "operators", "sends\nto", "micro-\nbatch", "in\nflight"),
        *("compute", "messages", "load", "memory"),
    ]
    stages = sized_stages(evaluation.plan, request)
    names = [str(stage) for stage in range(evaluation.plan.num_stages)] + ["loss"]
    rows = [
        [
            str(found.stage.id),
            indices_text(found.stage.devices),
            summarize_operators(request.graph, found.stage.operators),
            ",".join(names[other] for other in stages.successors[found.stage.id]),
            f"{shares_text(found)}{' r' if found.stage.recompute else ''}",
            str(found.in_flight),
            seconds_text(found.compute_s),
            seconds_text(found.communication_s),
            load_text(found, evaluation),
            bytes_text(found.memory.total_bytes),
        ]
        for found in evaluation.stages
    ]
    return text_table(header, rows, left=["operators"], flexible="operators", max_width=max_width)


def load_text(found: StageEvaluation, evaluation: PlanEvaluation) -> str:
    """The time of a stage in parts of the slowest one's."""
    return percent_text(found.seconds_per_sample, evaluation.bottleneck.seconds_per_sample)


def shares_text(found: StageEvaluation) -> str:
    """Samples of a micro-batch; of replicas that divide it unequally: ``2 × 13 + 2 × 3``."""
    if len(set(found.stage.shares)) < 2:
        return samples_text(found.microbatch_size)
    sizes = []
    for units, run in groupby(found.stage.replica_multiples):
        size = samples_text(found.microbatch_size * units / found.stage.microbatch_multiple)
        count = len([*run])
        sizes.append(f"{count} × {size}" if count > 1 else size)
    return " + ".join(sizes)


def describe_bounds(
    evaluation: PlanEvaluation, request: PlanRequest, *, max_width: int = 100
) -> str:
    """The bottleneck, what filling, draining and large outputs add, and the peak of memory."""
    step_s, found = evaluation.step_s, [one.stage for one in evaluation.bottlenecks]
    devices = sorted({device for stage in found for device in stage.devices})
    pace = (
        f"Bottleneck: {stages_text([stage.id for stage in found])} ({devices_text(devices)}) by "
        f"{evaluation.pacemaker.bound}, {seconds_text(evaluation.seconds_per_sample)} per sample"
    )
    steady_s = evaluation.minibatch_size * evaluation.seconds_per_sample
    step = (
        f"Step: {seconds_text(steady_s)} at the bottleneck's pace, and "
        f"{seconds_text(max(0.0, step_s - steady_s))} to fill and drain the pipeline"
    )
    if steady_s > step_s:
        step = f"Step: {seconds_text(step_s)}; messages and all-reduces overlap with compute"
    most = max(evaluation.devices, key=lambda device: device.memory_bytes)
    memory = f"Peak memory: {bytes_text(most.memory_bytes)}"
    if (limit_bytes := most.limit_bytes) is not None:
        share = percent_text(most.memory_bytes, limit_bytes)
        memory += f" of {bytes_text(limit_bytes)} ({share})"
    memory += f" on device {most.device}{'' if most.fits else ': the plan does not fit'}"
    texts = (pace, step, *describe_outputs(evaluation, request), memory)
    return wrapped([f"{text}." for text in texts], max_width)


LARGE_OUTPUTS = 0.05
"""Of a step: outputs whose way to the user's step takes less are not worth a line."""


def describe_outputs(evaluation: PlanEvaluation, request: PlanRequest) -> list[str]:
    """The cost of sending large outputs to the user's step, with a remedy; empty if it is small."""
    graph, step_s = request.graph, evaluation.step_s
    if not request.holds_all or evaluation.plan.num_stages == 1:
        return []
    small = replace(request, graph=_with_small_outputs(graph))
    cost_s = step_s - evaluate_plan(evaluation.plan, small).step_s
    if cost_s < LARGE_OUTPUTS * step_s:
        return []
    size_bytes = edge_bytes(graph, graph.outputs).forward(1)
    return [
        f"Outputs: {bytes_text(round(size_bytes))} a sample go to your step and gradients back, "
        f"{percent_text(cost_s, step_s)} of the step; a forward that returns less (a head or the "
        "loss inside of it) saves that"
    ]


def _with_small_outputs(graph: ModelGraph) -> ModelGraph:
    """The model where outputs that no operator reads have one element a sample."""

    def small(value: Value) -> Value:
        if value.name not in ends:
            return value
        shapes = [
            tuple(n if at == one.batch_dim else 1 for at, n in enumerate(one.shape))
            for one in value.tensors
        ]
        tensors = (replace(one, shape=shape) for one, shape in zip(value.tensors, shapes))
        return replace(value, tensors=tuple(tensors))

    ends = {*graph.outputs} - {name for name, *_ in graph.reads}
    operators = (replace(one, outputs=tuple(map(small, one.outputs))) for one in graph)
    return replace(graph, operators=tuple(operators))


def _columns(evaluation: PlanEvaluation, request: PlanRequest) -> list[str]:
    """What the columns of the stages mean, and where the seconds are from."""
    recomputes = any(found.stage.recompute for found in evaluation.stages)
    return [
        "Depth: stages on the longest path. Predicted step: operators and messages, without your "
        "step, data and optimizer.",
        f"Compute: forward and backward of one micro-batch ({describe_source(request)}).",
        "Messages: time to send one micro-batch; overlaps with compute.",
        "Load: compute or messages per sample, whichever is longer, plus the all-reduce, in per "
        "cent of the busiest stage.",
        f"Memory: parameters, gradients, optimizer state ({request.optimizer_values} values per "
        "parameter) and activations in flight, on each device."
        f"{' r: activations are recomputed.' if recomputes else ''}",
    ]


def describe_source(request: PlanRequest) -> str:
    """Where the costs are from."""
    kinds = dict.fromkeys(request.costs.kind_for(kind) for kind in request.cluster.kinds)
    if request.is_estimated:
        return "estimated, not measured"
    if ANY_DEVICE in kinds:
        return "from the published profile"
    return f"measured on {', '.join(kinds)}"


def sized_stages(plan: Plan, request: PlanRequest) -> StageGraph:
    """The stage graph of a plan, the one of the loss included, with the bytes of its messages.

    A message carries the activations of one micro-batch of the smaller side, all replicas together.
    """
    pipeline = plan_graph(plan, request.graph)
    unit_size = request.minibatch_size / num_microbatches(plan, request)
    edges = []
    for edge in pipeline.stages.edges:
        source = pipeline.stages.num_stages - 1 if edge.source == FEED else edge.source
        units = min(pipeline.multiples[source], pipeline.multiples[edge.target])
        size_bytes = edge_bytes(request.graph, edge.values).forward(units * unit_size)
        edges.append(replace(edge, size_bytes=round(size_bytes)))
    return replace(pipeline.stages, edges=tuple(edges))


def does_not_fit(found: PlanEvaluation) -> str:
    """Which device lacks memory, for a plan that is not feasible."""
    device = max(found.devices, key=lambda d: d.memory_bytes - (d.limit_bytes or d.memory_bytes))
    return (
        f"device {device.device} needs {bytes_text(device.memory_bytes)} of "
        f"{bytes_text(device.limit_bytes or 0)}"
    )
