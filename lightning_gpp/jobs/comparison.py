"""Planners side by side: a row for each, as text, JSON and CSV."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_gpp.common.text_table import text_table, wrapped
from lightning_gpp.common.units_of_measure import (
    bytes_text,
    number_text,
    samples_text,
    seconds_text,
)
from lightning_gpp.jobs.search.searched import Searched
from lightning_gpp.jobs.table_files import cell, save_rows
from lightning_gpp.planner import PlanEvaluation, refusal_notes
from lightning_gpp.reports.plan.explain import does_not_fit

LONGER = "than\nbest"
"""Column: how much longer a step is than the shortest one of the same question."""

SPMD = "spmd"
"""What stands in the place of a schedule where all devices work on every operator."""


@dataclass(frozen=True, slots=True)
class ComparedPlan:
    """What one planner found, in plain numbers; they are None where it found nothing.

    Attributes:
        planner: its name.
        schedule: name of the schedule that runs its plan; empty where there is none.
        step_s: seconds of a step.
        samples_per_s: throughput.
        num_stages: stages.
        depth: stages on the longest path.
        in_flight: most micro-batches between forward and backward in any stage.
        in_flight_samples: samples of these.
        bottleneck_stage: the stage that sets the pace.
        bottleneck_bound: ``"compute"`` or ``"communication"``.
        bottleneck_seconds_per_sample: what that stage takes.
        peak_memory_bytes: on the fullest device.
        message_bytes: that all devices send in a step.
        search_s: seconds that the planner searched.
        error: why there is no plan, or why it cannot be used.
        note: what else to know of the plan.
        settings: overrides of the job of a sweep, name -> value.
    """

    planner: str
    schedule: str = ""
    step_s: float | None = None
    samples_per_s: float | None = None
    num_stages: int | None = None
    depth: int | None = None
    in_flight: int | None = None
    in_flight_samples: float | None = None
    bottleneck_stage: int | None = None
    bottleneck_bound: str | None = None
    bottleneck_seconds_per_sample: float | None = None
    peak_memory_bytes: int | None = None
    message_bytes: float | None = None
    search_s: float | None = None
    error: str = ""
    note: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)


def compared(searched: Searched, settings: Mapping[str, str]) -> ComparedPlan:
    """The row of a planner's answer in a job of a sweep, or in none."""
    found = searched.evaluation
    if found is None:
        return ComparedPlan(
            searched.planner,
            search_s=searched.search_s,
            error=searched.failure,
            settings=settings,
        )
    return _row(searched, found, settings)


def _row(searched: Searched, found: PlanEvaluation, settings: Mapping[str, str]) -> ComparedPlan:
    fullest = max(found.stages, key=lambda stage: stage.in_flight * stage.microbatch_size)
    slowest = found.bottleneck
    return ComparedPlan(
        searched.planner,
        searched.schedule,
        step_s=found.minibatch_s,
        samples_per_s=found.throughput,
        num_stages=found.plan.num_stages,
        depth=found.depth,
        in_flight=fullest.in_flight,
        in_flight_samples=fullest.in_flight * fullest.microbatch_size,
        bottleneck_stage=slowest.stage.id,
        bottleneck_bound=slowest.bound,
        bottleneck_seconds_per_sample=slowest.seconds_per_sample,
        peak_memory_bytes=found.peak_memory_bytes,
        message_bytes=searched.message_bytes,
        search_s=searched.search_s,
        error="" if found.is_feasible else does_not_fit(found),
        note="; ".join((*refusal_notes(found.plan), *searched.plan_notes)).rstrip("."),
        settings=settings,
    )


def describe_comparison(rows: Sequence[ComparedPlan], *, max_width: int = 100) -> str:
    """A table with a row per planner; what went wrong stands behind, or below; notes below.

    Columns that say least are left out where the terminal is narrow.
    """
    columns = _columns(rows)
    flexible = "error" if any(row.error for row in rows) else None
    for dropped in (
        *("", "in\nflight", "stages", "bound\nby", "bottleneck\nper sample", "depth", LONGER),
        *("messages", "memory"),
    ):
        columns.pop(dropped, None)
        shown = columns if flexible else {n: c for n, c in columns.items() if n != "error"}
        cells = [list(row) for row in zip(*shown.values(), strict=True)]
        left = {"planner", "schedule", "error", "bound\nby"}
        table = text_table([*shown], cells, left=left, flexible=flexible, max_width=max_width)
        if max(map(len, table.split("\n"))) <= max_width:
            break
    notes = dict.fromkeys(f"{row.planner}: {row.note}." for row in rows if row.note)
    return f"{table}\n\n{wrapped([*notes], max_width)}" if notes else table


def describe_comparison_columns(
    table: str, source: str, schedules: Collection[str], *, max_width: int = 100
) -> str:
    """What the columns of :func:`describe_comparison` mean.

    Args:
        table: has them.
        source: where the costs are from.
        schedules: that run the plans.
        max_width: columns of the terminal.
    """
    sentences = {
        "step": f"Step: predicted for one mini-batch (costs: {source}; schedule: "
        f"{' or '.join(sorted(schedules)) or 'none'}).",
        "depth": "Depth: stages on the longest path, the loss too where it is apart.",
        "flight": "In flight: most micro-batches that a stage holds at a time, and their samples.",
        "per sample": "Bottleneck: the stage that sets the pace, the longer of its compute and "
        "messages, and its sums of gradients.",
        "memory": "Memory: of the fullest device.",
        "messages": "Messages: bytes that all devices send.",
        "search": "Search: time to find the plan.",
    }
    if SPMD in schedules:
        sentences["step"] += (
            " Where it is spmd, all devices work on every operator: hap by the program that is "
            "cheapest, even_shares and shares_by_speed on samples (DP-EV, DP-CP), "
            "sharded_data_parallel with parts of all weights (ZeRO)."
        )
    header = table.partition("─")[0]
    sentences = {name: text for name, text in sentences.items() if name in header}
    return wrapped([*sentences.values()], max_width)


def varied_settings(rows: Sequence[ComparedPlan]) -> list[str]:
    """Names of the settings that are not the same in all rows."""
    names = list(dict.fromkeys(name for row in rows for name in row.settings))
    return [name for name in names if len({row.settings.get(name) for row in rows}) > 1]


def _columns(rows: Sequence[ComparedPlan]) -> dict[str, list[str]]:
    """Header -> cells."""
    columns = {
        name.replace(".", ".\n"): [row.settings.get(name, "") for row in rows]
        for name in varied_settings(rows)
    }
    columns["planner"] = [row.planner for row in rows]
    if len({row.schedule for row in rows if row.schedule}) > 1:
        columns["schedule"] = [row.schedule for row in rows]
    return columns | {
        "step": [cell(row.step_s, seconds_text) for row in rows],
        LONGER: _longer(rows),
        "samples/s": [cell(row.samples_per_s, number_text) for row in rows],
        "stages": [cell(row.num_stages, str) for row in rows],
        "depth": [cell(row.depth, str) for row in rows],
        "in\nflight": [_in_flight(row) for row in rows],
        "bottleneck\nper sample": [
            cell(row.bottleneck_seconds_per_sample, seconds_text) for row in rows
        ],
        "bound\nby": [_bound(row) for row in rows],
        "memory": [cell(row.peak_memory_bytes, bytes_text) for row in rows],
        "messages": [cell(row.message_bytes, bytes_text) for row in rows],
        "search": [cell(row.search_s, seconds_text) for row in rows],
        "error": [row.error.replace("\n", " ") for row in rows],
    }


def _longer(rows: Sequence[ComparedPlan]) -> list[str]:
    best_s: dict[tuple[tuple[str, str], ...], float] = {}
    for row in rows:
        if row.step_s is not None and not row.error:
            question = tuple(row.settings.items())
            best_s[question] = min(row.step_s, best_s.get(question, row.step_s))
    return [_longer_text(row.step_s, best_s.get(tuple(row.settings.items()))) for row in rows]


def _longer_text(step_s: float | None, best_s: float | None) -> str:
    return "" if step_s is None or best_s is None else f"{round(100 * (step_s / best_s - 1)):+d} %"


def _in_flight(row: ComparedPlan) -> str:
    if row.in_flight is None or row.in_flight_samples is None:
        return ""
    return f"{row.in_flight} x {samples_text(row.in_flight_samples / row.in_flight)}"


def _bound(row: ComparedPlan) -> str:
    if row.bottleneck_bound is None:
        return ""
    what = {"compute": "compute", "communication": "messages"}[row.bottleneck_bound]
    return f"{row.bottleneck_stage} {what}"


def write_comparison(rows: Sequence[ComparedPlan], folder: Path) -> None:
    """Writes ``compare.json`` and ``compare.csv``, whose first columns are the settings."""
    save_rows(rows, folder, "compare", [name for row in rows for name in row.settings])


def read_compared_jobs(path: Path) -> list[ComparedPlan]:
    """The rows of all jobs of a sweep, in the order of the jobs."""
    jobs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    ordered = sorted(jobs, key=lambda job: int(job["number"]))
    return [ComparedPlan(**row) for job in ordered for row in job["rows"]]
