"""The job ``compare``: asks all planners the same question and puts their plans side by side.

Where the schedule does not drain it compares policies of weights: what a step takes and what stages
hold is predicted for each, and a recipe is trained with each, too, from the same seed. Where the
model is called with one graph, it compares numbers of ways to divide its vertices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

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
from lightning_gpp.jobs.options import as_flag, as_limit_s, as_list
from lightning_gpp.jobs.plan import chosen_plan
from lightning_gpp.jobs.problem.full_graph import FullGraphProblem, full_graph_of
from lightning_gpp.jobs.problem.problem import (
    PlanningProblem,
    per_update_of,
    policy_of,
    with_policy,
)
from lightning_gpp.jobs.problem.problem_of import problem_of, problem_without_policy
from lightning_gpp.jobs.search import search
from lightning_gpp.jobs.spmd import SPMD_PLANNERS, check_spmd, program_within
from lightning_gpp.jobs.sweep import split_override
from lightning_gpp.jobs.table import Cell, Row, cell, console_width, describe_rows, save_rows
from lightning_gpp.planner import PLANNERS, PlanRequest
from lightning_gpp.planner.plan_to_run import PlanQuestion
from lightning_gpp.reports.plan.describe import describe_source
from lightning_gpp.weights.policies import POLICIES, Policy, find_policy


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
            "ways": answer.model.num_ways,
            "groups": answer.request.num_devices // answer.model.num_ways,
            "chunks": answer.request.num_microbatches or 1,
            "epoch_s": answer.evaluation.step_s,
            "message_bytes": answer.message_bytes,
            "peak_memory_bytes": answer.evaluation.peak_memory_bytes,
        }
        for answer in answers
    ]
    best_s = min(row["epoch_s"] for row in rows)
    too_large = {each.model.num_ways for each in answers if not each.evaluation.is_feasible}
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


COLUMNS_OF_POLICIES = (
    "Step: of one mini-batch, simulated with each policy's own plan; flush drains after every one.",
    "Versions: copies of its parameters that a stage holds at most. Memory: simulated, of the "
    "fullest device.",
    "Trained: median seconds of a step of the last epoch on this machine, and the final metrics; "
    "from one seed, so "
    "small differences mean nothing.",
)

POLICY_NUMBERS = ("step_s", "samples_per_s", "versions", "peak_memory_bytes", "trained_step_s")


def compare_policies(config: DictConfig, folder: Path) -> dict[str, float]:
    """Prints the table, and writes ``policies.json`` and ``policies.csv``.

    Returns:
        The predicted throughput with every policy, in samples per second, by its name.
    """
    asked, width = as_list("job.weights", config.job.weights), console_width()
    if asked == []:
        raise ValueError("job.weights: expected at least one policy, or null for all")
    policies = [find_policy(str(name)) for name in asked or POLICIES]
    trains = as_flag("job.train", config.job.train) and config.graph is None
    problem = problem_without_policy(config, folder)
    print(f"{problem.describe(max_width=width)}\n", flush=True)
    rows = [compared_policy(config, problem, policy, trains=trains) for policy in policies]
    save_rows(rows, folder, "policies")
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    columns: dict[str, Cell] = {
        "policy": cell("policy"),
        "step": cell("step_s", seconds_text),
        "samples/s": cell("samples_per_s", number_text),
        "versions": cell("versions"),
        "memory": cell("peak_memory_bytes", bytes_text),
        "trained\nstep": cell("trained_step_s", seconds_text),
        # Of validation where there are such, else all.
        **{name: _metric(name) for name in [n for n in names if n.startswith("val")] or names},
        "error": lambda row: row["error"].replace("\n", " "),
    }
    left = {"policy", "error"}
    print(describe_rows(rows, columns, left=left, flexible="error", max_width=width))
    print(f"\n{wrapped(COLUMNS_OF_POLICIES if trains else COLUMNS_OF_POLICIES[:-1], width)}")
    print(f"\n{written_to(folder)}")
    return {row["policy"]: row["samples_per_s"] for row in rows if row["samples_per_s"] is not None}


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
