"""The stage graph of a plan as a PNG, with the numbers of its evaluation."""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path

from lightning_gpp.common.units_of_measure import (
    bytes_text,
    count_text,
    devices_text,
    number_text,
    percent_text,
    samples_text,
    seconds_text,
    stages_text,
)
from lightning_gpp.graph import FEED, StageGraph
from lightning_gpp.graph.operator_names import summarize_operators
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, StageEvaluation
from lightning_gpp.reports.plan.describe_shares import shares_text
from lightning_gpp.reports.plan.message_sizes import sized_stages
from lightning_gpp.reports.plan.picture_png import write_png
from lightning_gpp.reports.plan.picture_stages import StageBox, stage_graph_picture

TEXT_WIDTH = 30
"""Characters in a box where there are few side by side."""

NARROW_WIDTH = 20
CROWDED = 6
"""More boxes than this side by side are narrow."""

NO_BREAK = "\N{NO-BREAK SPACE}"

MOST_LINES = 2
"""Lines for the operators of a stage."""


def write_plan_picture(
    path: Path, evaluation: PlanEvaluation, request: PlanRequest, *, model: str = ""
) -> None:
    """Writes a PNG of a plan: boxes of stages with their time and memory, the bottleneck marked.

    Args:
        path: of the file.
        evaluation: of the plan.
        request: the question that it answers.
        model: its name.
    """
    stages = sized_stages(evaluation.plan, request)
    crowd = max(Counter(stages.depths.values()).values())
    width = NARROW_WIDTH if crowd > CROWDED else TEXT_WIDTH
    boxes = [_box(found, evaluation, request, width) for found in evaluation.stages]
    if stages.num_stages > len(boxes):
        boxes.append(StageBox((f"loss · device {evaluation.stages[-1].stage.devices[0]}",)))
    picture = stage_graph_picture(
        stages,
        boxes,
        _edge_texts(stages),
        title=_title(evaluation, request, model),
        subtitle=_subtitle(evaluation),
    )
    write_png(picture, path)


def _title(evaluation: PlanEvaluation, request: PlanRequest, model: str) -> str:
    plan = evaluation.plan
    return (
        f"{model or 'Model'} on {count_text(len(evaluation.devices), 'device')} "
        f"({', '.join(request.cluster.kinds)}): plan {plan.planner!r}, "
        f"{count_text(plan.num_stages, 'stage')}, depth {evaluation.depth}"
    )


def _subtitle(evaluation: PlanEvaluation) -> str:
    pace = evaluation.bottlenecks
    samples = count_text(evaluation.minibatch_size // evaluation.num_minibatches, "sample")
    return (
        f"predicted step {seconds_text(evaluation.minibatch_s)} for {samples}, "
        f"{number_text(evaluation.throughput)} samples/s; "
        f"pace: {stages_text([found.stage.id for found in pace])} ({evaluation.pacemaker.bound})"
    )


def _box(
    found: StageEvaluation, evaluation: PlanEvaluation, request: PlanRequest, width: int
) -> StageBox:
    slowest = evaluation.bottleneck
    stage = found.stage
    lines = [f"stage {stage.id} · {devices_text(stage.devices)}"]
    lines += _short(summarize_operators(request.graph, stage.operators), width)
    batch = f"micro-batch {samples_text(found.microbatch_size)}, {found.in_flight} in flight"
    lines += textwrap.wrap(batch, width)
    if stage.num_replicas > 1:
        is_uneven = len(set(stage.shares)) > 1
        shares = f": {shares_text(found)} samples" if is_uneven else ""
        lines += textwrap.wrap(f"{stage.num_replicas} replicas{shares}", width)
    if stage.recompute:
        lines.append("activations again")
    limits = [request.cluster.devices[device].memory_bytes for device in stage.devices]
    limit = min((limit for limit in limits if limit is not None), default=None)
    used = found.memory.total_bytes
    load = found.seconds_per_sample / slowest.seconds_per_sample
    return StageBox(
        tuple(lines),
        time_text=f"{seconds_text(found.seconds_per_sample)} · {percent_text(load, 1)}",
        time_share=load,
        bound=found.bound,
        memory_text=bytes_text(used) + (f" · {percent_text(used, limit)}" if limit else ""),
        memory_share=used / limit if limit else 0.0,
        num_replicas=stage.num_replicas,
        is_bottleneck=found in evaluation.bottlenecks,
    )


def _short(text: str, width: int) -> list[str]:
    """The first lines of a text."""
    glued = text.replace(" (", f"{NO_BREAK}(")
    lines = [line.replace(NO_BREAK, " ") for line in textwrap.wrap(glued, width)]
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], f"{lines[MOST_LINES - 1][: width - 1]}…"]
    return lines


def _edge_texts(stages: StageGraph) -> dict[tuple[int, int], str]:
    return {
        (edge.source, edge.target): bytes_text(edge.size_bytes)
        for edge in stages.edges
        if edge.source != FEED and edge.values
    }
