"""Planners side by side: a row for each, as text, JSON and CSV."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from types import MappingProxyType

from lightning_gpp.common.text_table import wrapped
from lightning_gpp.common.units_of_measure import (
    bytes_text,
    number_text,
    samples_text,
    seconds_text,
)
from lightning_gpp.jobs.search import FoundPlan, NoPlan
from lightning_gpp.jobs.table import Cell, Row, cell, describe_rows, save_rows
from lightning_gpp.planner.baselines.best_plan import refusal_notes
from lightning_gpp.planner.step_time.evaluate import message_bytes
from lightning_gpp.reports.plan.explain import does_not_fit

LONGER = "than\nbest"
"""Column: how much longer a step is than the shortest one of the same question."""

SPMD = "spmd"
"""What stands in the place of a schedule where all devices work on every operator."""

NUMBERS = (
    *("step_s", "samples_per_s", "num_stages", "depth", "in_flight", "in_flight_samples"),
    *("bottleneck_stage", "bottleneck_bound", "bottleneck_seconds_per_sample"),
    *("peak_memory_bytes", "message_bytes", "search_s"),
)
NOTHING: Row = MappingProxyType(
    {
        "planner": "",
        "schedule": "",
        **dict.fromkeys(NUMBERS),
        "error": "",
        "note": "",
        "settings": {},
    }
)
"""What is known of a planner that found nothing.

``in_flight`` are micro-batches of the stage that holds most samples, ``error`` says why there is no
plan, or why it cannot be used, ``settings`` are the overrides of the job of a sweep.
"""

DROPPED = (
    *("in\nflight", "stages", "bound\nby", "bottleneck\nper sample", "depth", LONGER),
    *("messages", "memory"),
)
"""Columns that are left out where the terminal is narrow, the one that says least first."""


def compared(found: FoundPlan | NoPlan) -> Row:
    """The row of a planner's answer."""
    if isinstance(found, NoPlan):
        known = {"planner": found.planner, "search_s": found.search_s, "error": found.why}
        return {**NOTHING, **known}
    evaluation, plan = found.evaluation, found.evaluation.plan
    fullest = max(evaluation.stages, key=lambda stage: stage.in_flight * stage.microbatch_size)
    slowest = evaluation.bottleneck
    return {
        **NOTHING,
        "planner": found.planner,
        "schedule": found.request.schedule,
        "step_s": evaluation.minibatch_s,
        "samples_per_s": evaluation.throughput,
        "num_stages": plan.num_stages,
        "depth": evaluation.depth,
        "in_flight": fullest.in_flight,
        "in_flight_samples": fullest.in_flight * fullest.microbatch_size,
        "bottleneck_stage": slowest.stage.id,
        "bottleneck_bound": slowest.bound,
        "bottleneck_seconds_per_sample": slowest.seconds_per_sample,
        "peak_memory_bytes": evaluation.peak_memory_bytes,
        "message_bytes": message_bytes(plan, found.request),
        "search_s": found.search_s,
        "error": "" if evaluation.is_feasible else does_not_fit(evaluation),
        "note": "; ".join((*refusal_notes(plan), *found.answer.notes)).rstrip("."),
    }


def describe_comparison(rows: Sequence[Row], *, max_width: int = 100) -> str:
    """A table with a row per planner; what went wrong stands behind, or below; notes below."""
    table = describe_rows(
        rows,
        _columns(rows),
        left={"planner", "schedule", "error", "bound\nby"},
        flexible="error",
        dropped=DROPPED,
        max_width=max_width,
    )
    notes = dict.fromkeys(f"{row['planner']}: {row['note']}." for row in rows if row["note"])
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
    return wrapped([text for name, text in sentences.items() if name in header], max_width)


def _columns(rows: Sequence[Row]) -> dict[str, Cell]:
    names = dict.fromkeys(name for row in rows for name in row["settings"])
    columns: dict[str, Cell] = {
        name.replace(".", ".\n"): lambda row, name=name: row["settings"].get(name, "")  # type: ignore[misc]
        for name in names
        if len({row["settings"].get(name) for row in rows}) > 1
    }
    columns["planner"] = cell("planner")
    if len({row["schedule"] for row in rows if row["schedule"]}) > 1:
        columns["schedule"] = cell("schedule")
    return columns | {
        "step": cell("step_s", seconds_text),
        LONGER: _longer(rows),
        "samples/s": cell("samples_per_s", number_text),
        "stages": cell("num_stages"),
        "depth": cell("depth"),
        "in\nflight": _in_flight,
        "bottleneck\nper sample": cell("bottleneck_seconds_per_sample", seconds_text),
        "bound\nby": _bound,
        "memory": cell("peak_memory_bytes", bytes_text),
        "messages": cell("message_bytes", bytes_text),
        "search": cell("search_s", seconds_text),
        "error": lambda row: row["error"].replace("\n", " "),
    }


def _longer(rows: Sequence[Row]) -> Cell:
    best_s: dict[tuple[tuple[str, str], ...], float] = {}
    for row in rows:
        if row["step_s"] is not None and not row["error"]:
            question = tuple(row["settings"].items())
            best_s[question] = min(row["step_s"], best_s.get(question, row["step_s"]))

    def text(row: Row) -> str:
        step_s, least_s = row["step_s"], best_s.get(tuple(row["settings"].items()))
        known = step_s is not None and least_s is not None
        return f"{round(100 * (step_s / least_s - 1)):+d} %" if known else ""

    return text


def _in_flight(row: Row) -> str:
    count = row["in_flight"]
    return f"{count} x {samples_text(row['in_flight_samples'] / count)}" if count else ""


def _bound(row: Row) -> str:
    what = {"compute": "compute", "communication": "messages", None: ""}[row["bottleneck_bound"]]
    return f"{row['bottleneck_stage']} {what}" if what else ""


def save_comparison(rows: Sequence[Row], folder: Path) -> None:
    """Writes ``compare.json`` and ``compare.csv``, whose first columns are the settings."""
    save_rows(rows, folder, "compare", [name for row in rows for name in row["settings"]])
