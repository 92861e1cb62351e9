"""The job ``compare``: asks all planners the same question and puts their plans side by side.

Where the schedule does not drain it compares policies of weights: what a step takes and what stages
hold is predicted for each, and a recipe is trained with each, too, from the same seed. Where the
model is called with one graph, it compares numbers of ways to divide its vertices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_gpp.common.text_table import wrapped
from lightning_gpp.common.units_of_measure import bytes_text, count_text, number_text, seconds_text
from lightning_gpp.jobs.files import save_json, save_metrics, written_to
from lightning_gpp.jobs.options import as_flag, as_limit_s, as_list
from lightning_gpp.jobs.plan import chosen_plan
from lightning_gpp.jobs.problem.problem import (
    PlanningProblem,
    per_update_of,
    policy_of,
    with_policy,
)
from lightning_gpp.jobs.problem.problem_of import (
    FullGraphProblem,
    full_graph_of,
    problem_of,
    problem_without_policy,
)
from lightning_gpp.jobs.search import search
from lightning_gpp.jobs.spmd import SPMD_PLANNERS, check_spmd, program_within
from lightning_gpp.jobs.table import Cell, Row, cell, console_width, describe_rows, save_csv
from lightning_gpp.planner import PLANNERS, PlanRequest
from lightning_gpp.planner.plan_to_run import PlanQuestion
from lightning_gpp.planner.step_time.evaluate import message_bytes
from lightning_gpp.reports.plan.describe import describe_source
from lightning_gpp.reports.plan.explain import does_not_fit
from lightning_gpp.weights.policies import POLICIES, Policy, find_policy

SPMD = "spmd"
"""What stands in the place of a schedule where all devices work on every operator."""

NARROW = 90
"""Columns of a terminal in which not all columns of the table have room."""

NUMBERS = (
    *("step_s", "samples_per_s", "num_stages", "depth", "in_flight", "in_flight_samples"),
    *("bottleneck_stage", "bottleneck_bound", "bottleneck_seconds_per_sample"),
    *("peak_memory_bytes", "message_bytes", "search_s"),
)
"""Of a row: ``in_flight`` are micro-batches of the stage that holds most samples."""


def run(config: DictConfig, folder: Path) -> dict[str, float]:
    """Prints the table, and writes it as JSON and CSV.

    Returns:
        The throughput of every planner that found a plan, in samples per second, by its name; of
        policies likewise; seconds of an epoch by the number of ways.
    """
    if policy_of(config) is not None:
        return compare_policies(config, folder)
    one_graph = full_graph_of(config, folder)
    if one_graph is not None:
        return compare_ways(one_graph, folder)
    names = planners(config)
    limit_s = as_limit_s("job.limit_s", config.job.limit_s)
    problem = problem_of(config, folder)
    begin(problem)
    request, schedule = problem.request, problem.question.schedule
    rows = [
        compared(PlanQuestion(request, name, schedule), limit_s)
        for name in names
        if name in PLANNERS
    ]
    if programs := [name for name in names if name in SPMD_PLANNERS]:
        rows += compared_programs(config, request, programs, limit_s)
    schedules = {row["schedule"] for row in rows if row["schedule"]}
    legend = legend_of(describe_source(request), schedules)
    rates = {row["planner"]: row["samples_per_s"] for row in rows if row["samples_per_s"]}
    return end(rows, describe_comparison(rows, console_width()), legend, rates, "compare", folder)


def begin(problem: PlanningProblem) -> None:
    """Says what is compared, before searches take their time."""
    print(f"{problem.describe(max_width=console_width())}\n", flush=True)


def end(
    rows: Sequence[Row],
    table: str,
    legend: Sequence[str],
    metrics: dict[str, float],
    name: str,
    folder: Path,
) -> dict[str, float]:
    """Writes and shows a table and its legend; returns the metrics."""
    save_json(rows, folder / f"{name}.json")
    save_csv(rows, folder / f"{name}.csv")
    save_metrics(metrics, folder)
    print(f"{table}\n\n{wrapped(legend, console_width())}\n\n{written_to(folder)}")
    return metrics


# Planners -----------------------------------------------------------------------------------------


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
    texts = {"error": "", "note": ""}
    names = {"planner": planner, "schedule": schedule}
    return {**names, **dict.fromkeys(NUMBERS), **texts, **known}


def compared(question: PlanQuestion, limit_s: float | None) -> Row:
    """The row of a planner; that it has no plan is an answer, too."""
    start_s = time.perf_counter()
    try:
        found = search(question, limit_s)
    except ValueError as error:
        search_s = min(time.perf_counter() - start_s, limit_s or math.inf)
        return row_of(question.planner, error=str(error), search_s=search_s)
    evaluation, plan = found.evaluation, found.evaluation.plan
    fullest = max(evaluation.stages, key=lambda stage: stage.in_flight * stage.microbatch_size)
    slowest = evaluation.bottleneck
    return row_of(
        found.planner,
        found.request.schedule,
        step_s=evaluation.minibatch_s,
        samples_per_s=evaluation.throughput,
        num_stages=plan.num_stages,
        depth=evaluation.depth,
        in_flight=fullest.in_flight,
        in_flight_samples=fullest.in_flight * fullest.microbatch_size,
        bottleneck_stage=slowest.stage.id,
        bottleneck_bound=slowest.bound,
        bottleneck_seconds_per_sample=slowest.seconds_per_sample,
        peak_memory_bytes=evaluation.peak_memory_bytes,
        message_bytes=message_bytes(plan, found.request),
        search_s=found.search_s,
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
        "samples/s": cell("samples_per_s", number_text),
        "memory": cell("peak_memory_bytes", bytes_text),
        "messages": cell("message_bytes", bytes_text),
        "search": cell("search_s", seconds_text),
        "error": lambda row: row["error"].replace("\n", " "),
    }
    if len({row["schedule"] for row in rows if row["schedule"]}) < 2:
        del columns["schedule"]
    if not usable or max_width < NARROW:
        del columns["than\nbest"]
    left = {"planner", "schedule", "error"}
    table = describe_rows(rows, columns, left=left, flexible="error", max_width=max_width)
    notes = dict.fromkeys(f"{row['planner']}: {row['note']}." for row in rows if row["note"])
    return f"{table}\n\n{wrapped([*notes], max_width)}" if notes else table


def legend_of(source: str, schedules: Collection[str]) -> list[str]:
    """What the columns mean.

    Args:
        source: where the costs are from.
        schedules: that run the plans.
    """
    step = (
        f"Step: predicted for one mini-batch (costs: {source}; schedule: "
        f"{' or '.join(sorted(schedules)) or 'none'})."
    )
    if SPMD in schedules:
        step += (
            " Where it is spmd, all devices work on every operator: hap by the program that is "
            "cheapest, even_shares and shares_by_speed on samples (DP-EV, DP-CP), "
            "sharded_data_parallel with parts of all weights (ZeRO)."
        )
    return [
        step,
        "Memory: of the fullest device. Messages: bytes that all devices send. Search: time to "
        "find the plan. More of each plan: compare.csv.",
    ]


# Ways to divide one graph -------------------------------------------------------------------------

LEGEND_OF_WAYS = (
    "Ways: devices that divide the vertices of every chunk among themselves; groups: of layers. "
    "One way is a pipeline of layers, one group is graph parallelism.",
    "Epoch: predicted. Messages: activations and gradients that devices send in an epoch. Memory: "
    "of the fullest device, histories among it.",
)


def compare_ways(problem: FullGraphProblem, folder: Path) -> dict[str, float]:
    """A table with a row per number of ways."""
    answers, width = problem.answers, console_width()
    num_devices = answers[0].request.num_devices
    what = f"{problem.name} on {count_text(num_devices, 'device')}, from {problem.source}"
    print(f"{wrapped([what], width)}\n", flush=True)
    rows = [
        {
            "ways": answer.model.num_ways,
            "groups": answer.request.num_devices // answer.model.num_ways,
            "chunks": answer.request.num_microbatches or 1,
            "epoch_s": answer.evaluation.step_s,
            "message_bytes": answer.message_bytes,
            "peak_memory_bytes": answer.evaluation.peak_memory_bytes,
            "error": "" if answer.evaluation.is_feasible else "does not fit",
        }
        for answer in answers
    ]
    best_s = min(answer.evaluation.step_s for answer in answers)
    columns = {
        **{name: cell(name) for name in ("ways", "groups", "chunks")},
        "epoch": cell("epoch_s", seconds_text),
        "than\nbest": cell("epoch_s", lambda epoch_s: number_text(epoch_s / best_s)),
        "messages": cell("message_bytes", bytes_text),
        "memory": cell("peak_memory_bytes", bytes_text),
        "": cell("error"),
    }
    table = describe_rows(rows, columns, max_width=width)
    seconds = {f"ways_{one.model.num_ways}": one.evaluation.step_s for one in answers}
    return end(rows, table, LEGEND_OF_WAYS, seconds, "compare", folder)


# Policies of weights ------------------------------------------------------------------------------

LEGEND_OF_POLICIES = (
    "Step: of one mini-batch, simulated with each policy's own plan; flush drains after every one.",
    "Versions: copies of its parameters that a stage holds at most. Memory: simulated, of the "
    "fullest device.",
    "Trained: median seconds of a step of the last epoch on this machine, and the final metrics; "
    "from one seed, so small differences mean nothing.",
)

POLICY_NUMBERS = ("step_s", "samples_per_s", "versions", "peak_memory_bytes", "trained_step_s")


def compare_policies(config: DictConfig, folder: Path) -> dict[str, float]:
    """A table with a row per policy, as ``policies.json`` and ``policies.csv``."""
    asked = as_list("job.weights", config.job.weights)
    if asked == []:
        raise ValueError("job.weights: expected at least one policy, or null for all")
    policies = [find_policy(str(name)) for name in asked or POLICIES]
    trains = as_flag("job.train", config.job.train) and config.graph is None
    problem = problem_without_policy(config, folder)
    begin(problem)
    rows = [compared_policy(config, problem, policy, trains=trains) for policy in policies]
    metrics = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    columns: dict[str, Cell] = {
        "policy": cell("policy"),
        "step": cell("step_s", seconds_text),
        "samples/s": cell("samples_per_s", number_text),
        "versions": cell("versions"),
        "memory": cell("peak_memory_bytes", bytes_text),
        "trained\nstep": cell("trained_step_s", seconds_text),
        # Of validation where there are such, else all.
        **{name: _metric(name) for name in [n for n in metrics if n[:3] == "val"] or metrics},
        "error": lambda row: row["error"].replace("\n", " "),
    }
    left, width = {"policy", "error"}, console_width()
    table = describe_rows(rows, columns, left=left, flexible="error", max_width=width)
    legend = LEGEND_OF_POLICIES if trains else LEGEND_OF_POLICIES[:-1]
    rates = {row["policy"]: row["samples_per_s"] for row in rows if row["samples_per_s"]}
    return end(rows, table, legend, rates, "policies", folder)


def _metric(name: str) -> Cell:
    return lambda row: f"{row['metrics'][name]:.4g}" if name in row["metrics"] else ""


def compared_policy(
    config: DictConfig, problem: PlanningProblem, policy: Policy, *, trains: bool
) -> Row:
    """The row of a policy; what cannot be had is an answer, too."""
    # Imports the simulator, which planners do without.
    from lightning_gpp.simulate import simulate_plan

    per_update = per_update_of(config)
    row: dict[str, Any] = {"policy": policy.name, **dict.fromkeys(POLICY_NUMBERS)}
    row |= {"metrics": {}, "error": ""}
    try:
        found = chosen_plan(config, with_policy(problem, policy, per_update))
    except ValueError as failure:
        return row | {"error": str(failure)}
    request, stages = found.request, found.evaluation.stages
    simulation = simulate_plan(found.evaluation.plan, request)
    curves = simulation.device_memory.values()
    most_ahead = max(stage.in_flight for stage in stages) - 1
    row |= {
        "step_s": simulation.minibatch_s,
        "samples_per_s": request.minibatch_size / simulation.step_s,
        "versions": max(request.held_versions.of(stage.in_flight) for stage in stages),
        "peak_memory_bytes": max(size for curve in curves for _, size in curve),
        "error": policy.why_not(per_update, most_ahead) or "",
    }
    if trains and not row["error"]:
        try:
            row |= trained(config, policy)
        except (ValueError, NotImplementedError) as failure:
            row["error"] = str(failure)
    return row


def trained(config: DictConfig, policy: Policy) -> Row:
    """Trains the recipe: seconds of a step, None where there were too few, and its metrics."""
    from lightning_gpp.jobs.step_watch import SECONDS, StepWatch
    from lightning_gpp.jobs.train import train

    asked = OmegaConf.merge(config, {"strategy": {"weights": policy.name}})
    assert isinstance(asked, DictConfig)
    metrics = train(asked, [StepWatch()])
    return {"trained_step_s": metrics.pop(SECONDS, None), "metrics": metrics}
