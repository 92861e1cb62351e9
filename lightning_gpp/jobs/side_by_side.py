"""Numbers of pipelines side by side, planned and compared (``job=plan job.side_by_side=true``)."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.common.text_table import text_table
from lightning_gpp.common.units_of_measure import bytes_text, seconds_text
from lightning_gpp.jobs.search.searched import search
from lightning_gpp.planner.plan_to_run import PlanQuestion
from lightning_gpp.planner.side_by_side import (
    SideBySide,
    pipeline_counts,
    pipeline_request,
    side_by_side,
)


def compared_side_by_side(question: PlanQuestion, limit_s: float | None = None) -> list[SideBySide]:
    """Every number of equal pipelines that the devices make, the fastest first.

    Args:
        question: about all devices.
        limit_s: seconds of each search.

    Raises:
        ValueError: no plan fits, for any number.
    """
    whole, found, failure = question.request, [], ""
    for count in pipeline_counts(whole):
        part = PlanQuestion(pipeline_request(whole, count), question.planner, question.schedule)
        searched = search(part, limit_s)
        if searched.evaluation is None:
            failure = searched.failure
        else:
            found.append(side_by_side(whole, count, searched.evaluation))
    if not found:
        raise ValueError(failure)
    return sorted(found, key=lambda each: -each.throughput)


def describe_side_by_side(found: Sequence[SideBySide]) -> str:
    """Numbers of pipelines as a table, for the same samples in a step of all."""
    rows = [
        (
            str(each.num_pipelines),
            f"{each.pipeline.plan.num_devices} of {each.num_devices}",
            str(each.pipeline.plan.num_stages),
            seconds_text(each.pipeline.minibatch_s),
            seconds_text(each.average_s),
            f"{each.throughput:,.0f}",
            bytes_text(each.pipeline.peak_memory_bytes),
        )
        for each in found
    ]
    head = ("pipelines", "uses devices", "stages", "step", "average", "samples/s", "fullest device")
    title = "Pipelines side by side (strategy.pipelines), predicted, the fastest first:"
    return f"{title}\n{text_table(head, rows)}"
