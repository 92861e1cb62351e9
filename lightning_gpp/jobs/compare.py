"""The job ``compare``: asks all planners the same question and puts their plans side by side.

Where the schedule does not drain it compares policies of weights (:mod:`.policies`); where the
model is called with one graph, numbers of ways to divide its vertices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_gpp.common.text_table import wrapped
from lightning_gpp.common.units_of_measure import bytes_text, count_text, number_text, seconds_text
from lightning_gpp.jobs.comparison import (
    NOTHING,
    SPMD,
    compared,
    describe_comparison,
    describe_comparison_columns,
    save_comparison,
)
from lightning_gpp.jobs.files import save_json, written_to
from lightning_gpp.jobs.job_scope import is_sweep
from lightning_gpp.jobs.options import as_limit_s, as_list
from lightning_gpp.jobs.policies import compare_policies
from lightning_gpp.jobs.problem.full_graph import FullGraphProblem, full_graph_of
from lightning_gpp.jobs.problem.problem import policy_of
from lightning_gpp.jobs.problem.problem_of import problem_of
from lightning_gpp.jobs.search import search
from lightning_gpp.jobs.spmd import SPMD_PLANNERS, check_spmd, program_within
from lightning_gpp.jobs.sweep import split_override
from lightning_gpp.jobs.table import Row, cell, console_width, describe_rows
from lightning_gpp.planner import PLANNERS, PlanRequest
from lightning_gpp.planner.plan_to_run import PlanQuestion
from lightning_gpp.reports.plan.describe import describe_source


def run(config: DictConfig, folder: Path) -> dict[str, float]:
    """Prints the table, and writes ``compare.json`` and ``compare.csv``.

    Returns:
        The throughput of every planner that found a plan, in samples per second, by its name.
    """
    if policy_of(config) is not None:
        return compare_policies(config, folder)
    one_graph = full_graph_of(config, folder)
    if one_graph is not None:
        return compare_ways(one_graph, folder)
    names, width = planners(config), console_width()
    limit_s = as_limit_s("job.limit_s", config.job.limit_s)
    problem = problem_of(config, folder)
    request = problem.request
    print(f"{problem.describe(max_width=width)}\n", flush=True)
    rows = [
        compared(search(PlanQuestion(request, name, problem.schedule), limit_s))
        for name in names
        if name in PLANNERS
    ]
    if programs := [name for name in names if name in SPMD_PLANNERS]:
        rows += compared_programs(config, request, programs, limit_s)
    overrides = HydraConfig.get().overrides.task if is_sweep() else []
    settings = dict(map(split_override, overrides))
    rows = [{**row, "settings": settings} for row in rows]
    save_comparison(rows, folder)
    table = describe_comparison(rows, max_width=width)
    schedules = {row["schedule"] for row in rows if row["schedule"]}
    source = describe_source(request)
    print(f"{table}\n\n{describe_comparison_columns(table, source, schedules, max_width=width)}")
    print(f"\n{written_to(folder)}")
    return {
        row["planner"]: row["samples_per_s"] for row in rows if row["samples_per_s"] is not None
    }


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
    from lightning_gpp.spmd.run.node_reader import ExportError

    try:
        problem = spmd_problem(config, request)
    except (ExportError, TypeError, ValueError) as error:
        yield from ({**NOTHING, "planner": name, "error": str(error)} for name in names)
        return
    for name in names:
        row, start_s = {**NOTHING, "planner": name}, time.monotonic()
        try:
            plan, metrics = program_within(problem, name, request.minibatch_size, limit_s)
        except ValueError as error:
            yield row | {"error": str(error), "search_s": time.monotonic() - start_s}
            continue
        fits = plan.evaluation.fits(problem.machine)
        error_text = "" if fits else "does not fit into the memory of a device"
        yield row | {"schedule": SPMD, **metrics, "error": error_text}


COLUMNS_OF_WAYS = (
    "Ways: devices that divide the vertices of every chunk among themselves; groups: of layers. "
    "One way is a pipeline of layers, one group is graph parallelism.",
    "Epoch: predicted. Messages: activations and gradients that devices send in an epoch. Memory: "
    "of the fullest device, histories among it.",
)


def compare_ways(problem: FullGraphProblem, folder: Path) -> dict[str, float]:
    """Prints a table with a row per number of ways, and writes ``compare.json``.

    Returns:
        Seconds of an epoch by the number of ways.
    """
    width = console_width()
    what = f"{problem.name} on {count_text(problem.cluster.num_devices, 'device')}"
    print(f"{wrapped([f'{what}, from {problem.source}'], width)}\n", flush=True)
    answers = problem.answers
    rows = [
        {
            "ways": answer.question.num_ways,
            "groups": answer.question.num_groups,
            "chunks": answer.question.num_chunks,
            "epoch_s": answer.evaluation.step_s,
            "message_bytes": answer.message_bytes,
            "peak_memory_bytes": answer.evaluation.peak_memory_bytes,
        }
        for answer in answers
    ]
    best_s = min(row["epoch_s"] for row in rows)
    too_large = {each.question.num_ways for each in answers if not each.evaluation.is_feasible}
    columns = {
        "ways": cell("ways"),
        "groups": cell("groups"),
        "chunks": cell("chunks"),
        "epoch": cell("epoch_s", seconds_text),
        "than\nbest": cell("epoch_s", lambda epoch_s: number_text(epoch_s / best_s)),
        "messages": cell("message_bytes", bytes_text),
        "memory": cell("peak_memory_bytes", bytes_text),
        "": lambda row: "does not fit" if row["ways"] in too_large else "",
    }
    print(describe_rows(rows, columns, max_width=width))
    print(f"\n{wrapped(COLUMNS_OF_WAYS, width)}")
    save_json(rows, folder / "compare.json")
    print(f"\n{written_to(folder)}")
    return {f"ways_{row['ways']}": row["epoch_s"] for row in rows}
