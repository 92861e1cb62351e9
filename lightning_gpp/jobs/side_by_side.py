"""Numbers of pipelines side by side, planned and compared (``job=plan job.side_by_side=true``)."""

from __future__ import annotations

from typing import Any

from lightning_gpp.common.units_of_measure import bytes_text, seconds_text
from lightning_gpp.jobs.search import NoPlan, search
from lightning_gpp.jobs.table import cell, describe_rows
from lightning_gpp.planner.plan_to_run import PlanQuestion
from lightning_gpp.planner.side_by_side import pipeline_counts, pipeline_request, side_by_side


def describe_side_by_side(question: PlanQuestion, limit_s: float | None = None) -> str:
    """A table of all numbers of equal pipelines, for the same samples in a step of all.

    Args:
        question: about all devices.
        limit_s: seconds of each search.

    Raises:
        ValueError: no plan fits, for any number.
    """
    whole, why = question.request, ""
    rows: list[dict[str, Any]] = []
    for count in pipeline_counts(whole):
        part = PlanQuestion(pipeline_request(whole, count), question.planner, question.schedule)
        searched = search(part, limit_s)
        if isinstance(searched, NoPlan):
            why = searched.why
            continue
        found = side_by_side(whole, count, searched.evaluation)
        plan = searched.evaluation.plan
        rows.append(
            {
                "pipelines": count,
                "uses devices": f"{plan.num_devices} of {found.num_devices}",
                "stages": plan.num_stages,
                "step": searched.evaluation.minibatch_s,
                "average": found.average_s,
                "samples/s": found.throughput,
                "fullest device": searched.evaluation.peak_memory_bytes,
            }
        )
    if not rows:
        raise ValueError(why)
    rows.sort(key=lambda row: -row["samples/s"])
    writes = {"step": seconds_text, "average": seconds_text, "fullest device": bytes_text}
    writes["samples/s"] = lambda rate: f"{rate:,.0f}"
    columns = {name: cell(name, writes.get(name, str)) for name in rows[0]}
    title = "Pipelines side by side (strategy.pipelines), predicted, the fastest first:"
    return f"{title}\n{describe_rows(rows, columns)}"
