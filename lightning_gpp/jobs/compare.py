"""The job ``compare``: plans of all planners for one question, side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_gpp.common.text_table import wrapped
from lightning_gpp.common.units_of_measure import bytes_text, number_text, seconds_text
from lightning_gpp.jobs.files import save_json, save_metrics, written_to
from lightning_gpp.jobs.options import as_limit_s, as_list
from lightning_gpp.jobs.problem.problem_of import (
    is_on_one_graph,
    problem_of,
)
from lightning_gpp.jobs.search import search
from lightning_gpp.jobs.spmd import SPMD_PLANNERS, check_spmd, program_within
from lightning_gpp.jobs.table import Cell, Row, cell, console_width, describe_rows
from lightning_gpp.planner import PLANNERS, PlanRequest
from lightning_gpp.planner.graphpipe.bounds import least_plan_s
from lightning_gpp.planner.plan_to_run import PlanQuestion
from lightning_gpp.planner.step_time.evaluate import message_bytes
from lightning_gpp.reports.plan.describe import describe_source, does_not_fit

SPMD = "spmd"
"""What stands in the place of a schedule where all devices work on every operator."""

NUMBERS = (
    *("step_s", "work_s", "least_step_s", "samples_per_s", "num_stages", "depth"),
    *("peak_memory_bytes", "message_bytes"),
)


def run(config: DictConfig, folder: Path) -> dict[str, float]:
    """Prints the table, and writes it as JSON.

    Returns:
        The throughput of every planner that found a plan, in samples per second, by its name.

    Raises:
        ValueError: the model is called with one graph, for which there is one planner.
    """
    names, width = planners(config), console_width()
    if is_on_one_graph(config):
        raise ValueError("full graphs have one planner, so nothing is compared; use job=plan")
    limit_s = as_limit_s("job.limit_s", config.job.limit_s)
    problem = problem_of(config, folder)
    print(f"{problem.describe(max_width=width)}\n", flush=True)
    request, schedule = problem.request, problem.question.schedule
    rows = [
        compared(PlanQuestion(request, name, schedule), limit_s)
        for name in names
        if name in PLANNERS
    ]
    if programs := [name for name in names if name in SPMD_PLANNERS]:
        rows += compared_programs(config, request, programs, limit_s)
    save_json(rows, folder / "compare.json")
    rates = {row["planner"]: row["samples_per_s"] for row in rows if row["samples_per_s"]}
    save_metrics(rates, folder)
    schedules = {row["schedule"] for row in rows if row["schedule"]}
    legend = wrapped(legend_of(describe_source(request), schedules), width)
    print(f"{describe_comparison(rows, width)}\n\n{legend}\n\n{written_to(folder)}")
    return rates


def planners(config: DictConfig) -> Sequence[str]:
    """The planners to compare: those asked for, or all that know the model.

    Raises:
        ValueError: there is none of a name.
    """
    known = [*PLANNERS, *SPMD_PLANNERS]
    names = as_list("job.planners", config.job.planners)
    if names is None:
        return known if config.graph is None else [*PLANNERS]
    if not names:
        raise ValueError("job.planners: expected at least one planner, or null for all")
    for name in names:
        if name not in known:
            raise ValueError(f"unknown planner {name!r}; known planners: {', '.join(known)}")
        if name in SPMD_PLANNERS:
            check_spmd(config, f"job.planners: {name}")
    return names


def row_of(planner: str, schedule: str = "", **known: Any) -> Row:
    """A row; ``error`` says why there is no plan, or why it cannot be used."""
    names = {"planner": planner, "schedule": schedule}
    empty = {**dict.fromkeys(NUMBERS), "search_s": None, "error": "", "note": ""}
    return {**names, **empty, **known}


def compared(question: PlanQuestion, limit_s: float | None) -> Row:
    """The row of a planner; that it has no plan is an answer, too."""
    start_s = time.perf_counter()
    try:
        found = search(question, limit_s)
    except ValueError as error:
        search_s = min(time.perf_counter() - start_s, limit_s or math.inf)
        return row_of(question.planner, error=str(error), search_s=search_s)
    evaluation = found.evaluation
    return row_of(
        found.planner,
        found.request.schedule,
        **found.metrics,
        work_s=sum(device.busy_s for device in evaluation.devices)
        / (found.request.num_devices * evaluation.num_minibatches),
        least_step_s=least_plan_s(evaluation.plan, found.request) / evaluation.num_minibatches,
        message_bytes=message_bytes(evaluation.plan, found.request),
        error="" if evaluation.is_feasible else does_not_fit(evaluation),
        note="; ".join(found.answer.notes).rstrip("."),
    )


def compared_programs(
    config: DictConfig, request: PlanRequest, names: Sequence[str], limit_s: float | None
) -> Iterator[Row]:
    """A row for every planner of SPMD programs; what cannot be planned is a row, too.

    Args:
        config: of a recipe.
        request: what planners of pipelines are asked.
        names: of :data:`SPMD_PLANNERS`.
        limit_s: seconds after which a search is ended; None: never.
    """
    from lightning_gpp.jobs.problem.spmd_problem import spmd_problem
    from lightning_gpp.spmd.run.export import ExportError

    try:
        problem = spmd_problem(config, request)
    except (ExportError, TypeError, ValueError) as error:
        yield from (row_of(name, error=str(error)) for name in names)
        return
    for name in names:
        start_s = time.monotonic()
        try:
            plan, metrics = program_within(problem, name, request.minibatch_size, limit_s)
        except ValueError as error:
            yield row_of(name, error=str(error), search_s=time.monotonic() - start_s)
            continue
        fits = plan.evaluation.fits(problem.machine)
        error_text = "" if fits else "does not fit into the memory of a device"
        yield row_of(name, SPMD, **metrics, error=error_text)


def describe_comparison(rows: Sequence[Row], max_width: int = 100) -> str:
    """A table with a row per planner; what went wrong stands behind, or below; notes below."""
    usable = [row["step_s"] for row in rows if row["step_s"] is not None and not row["error"]]
    best_s = min(usable, default=math.inf)
    columns: dict[str, Cell] = {
        "planner": cell("planner"),
        "schedule": cell("schedule"),
        "step": cell("step_s", seconds_text),
        "than\nbest": cell("step_s", lambda s: f"{round(100 * (s / best_s - 1)):+d} %"),
        "work": cell("work_s", seconds_text),
        "at\nleast": cell("least_step_s", seconds_text),
        "samples/s": cell("samples_per_s", number_text),
        "memory": cell("peak_memory_bytes", bytes_text),
        "messages": cell("message_bytes", bytes_text),
        "search": cell("search_s", seconds_text),
        "error": lambda row: row["error"].replace("\n", " "),
    }
    if len({row["schedule"] for row in rows if row["schedule"]}) < 2:
        del columns["schedule"]
    if not usable:
        del columns["than\nbest"]
    left = {"planner", "schedule", "error"}
    table = describe_rows(rows, columns, left=left, flexible="error", max_width=max_width)
    notes = dict.fromkeys(f"{row['planner']}: {row['note']}." for row in rows if row["note"])
    return f"{table}\n\n{wrapped([*notes], max_width)}" if notes else table


def legend_of(source: str, schedules: Collection[str]) -> list[str]:
    """Explains the columns, the origin of the costs, and what runs the plans."""
    how = f"costs: {source}; schedule: {' or '.join(sorted(schedules)) or 'none'}"
    lines = [
        f"Step: predicted for one mini-batch ({how}).",
        "Work: if all devices computed all the time. At least: a lower bound of the plan's step in "
        "any order.",
        "Memory: of the fullest device. Messages: bytes that all devices send.",
    ]
    if SPMD in schedules:
        lines.append(
            "spmd: all devices work on every operator. even_shares, shares_by_speed: data "
            "parallelism (DP-EV, DP-CP). sharded_data_parallel: ZeRO."
        )
    return lines
