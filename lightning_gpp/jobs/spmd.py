"""Programs that run on all devices at once (HAP), beside pipelines and explained."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from lightning_gpp.common.text_table import wrapped
from lightning_gpp.jobs.comparison import SPMD, ComparedPlan
from lightning_gpp.jobs.console_width import console_width
from lightning_gpp.jobs.files import save_metrics, written_to
from lightning_gpp.jobs.options import as_limit_s
from lightning_gpp.jobs.problem.problem_of import problem_of
from lightning_gpp.jobs.search.time_limit import OutOfTimeError, call_within
from lightning_gpp.planner import PlanRequest
from lightning_gpp.reports.plan.verdict import PlanVerdict

if TYPE_CHECKING:
    from lightning_gpp.jobs.problem.spmd_problem import SpmdProblem
    from lightning_gpp.spmd.costs.judge import ProgramEvaluation
    from lightning_gpp.spmd.plan import SpmdPlan

# Programs need torch to export a model; the jobs that plan graphs of files do without.

HAP = "hap"
SPMD_PLANNERS: Mapping[str, str | None] = {
    HAP: None,
    "even_shares": "DP-EV",
    "shares_by_speed": "DP-CP",
    "sharded_data_parallel": "ZeRO",
}
"""Planners of SPMD programs by name: HAP, and what it was compared with, as the paper calls it."""


def compared_programs(
    config: DictConfig,
    request: PlanRequest,
    names: Sequence[str],
    settings: Mapping[str, str],
    limit_s: float | None = None,
) -> Iterator[ComparedPlan]:
    """A row for every planner of SPMD programs; what cannot be planned is a row, too.

    Args:
        config: of a recipe.
        request: what planners of pipelines are asked.
        names: of :data:`SPMD_PLANNERS`.
        settings: of the job of a sweep.
        limit_s: seconds after which a search is ended; None: never.
    """
    from lightning_gpp.jobs.problem.spmd_problem import spmd_problem
    from lightning_gpp.spmd.costs.message_bytes import message_bytes
    from lightning_gpp.spmd.run.node_reader import ExportError

    try:
        problem = spmd_problem(config, request)
    except (ExportError, TypeError, ValueError) as error:
        yield from (ComparedPlan(name, error=str(error), settings=settings) for name in names)
        return
    for name in names:
        start_s = time.monotonic()
        try:
            plan = program_within(problem, name, limit_s)
        except NoProgramError as error:
            search_s = time.monotonic() - start_s
            yield ComparedPlan(name, search_s=search_s, error=str(error), settings=settings)
            continue
        search_s, found = time.monotonic() - start_s, plan.evaluation
        fits = found.fits(problem.machine)
        yield ComparedPlan(
            name,
            SPMD,
            step_s=found.step_s,
            samples_per_s=request.minibatch_size / found.step_s,
            peak_memory_bytes=round(float(found.memory_bytes.max())),
            message_bytes=message_bytes(plan.program, problem.graph, problem.machine),
            search_s=search_s,
            error="" if fits else "does not fit into the memory of a device",
            settings=settings,
        )


class NoProgramError(ValueError):
    """A search ended without a program; the text says why."""


def program_within(problem: SpmdProblem, name: str, limit_s: float | None) -> SpmdPlan:
    """The program of a planner.

    Args:
        problem: the question.
        name: of :data:`SPMD_PLANNERS`.
        limit_s: seconds after which the search is ended; None: never.

    Raises:
        NoProgramError: none fits, or none was found within the limits.
    """
    try:
        if limit_s is None:
            found = search_program(problem, name)
        else:
            found = call_within(limit_s, search_program, problem, name)
    except OutOfTimeError as error:
        found = f"{error}; a larger job.limit_s gives it longer"
    if isinstance(found, str):
        raise NoProgramError(found)
    return found


def search_program(problem: SpmdProblem, name: str) -> SpmdPlan | str:
    """The program of a planner, or why there is none: errors do not go from process to process."""
    from lightning_gpp.spmd.plan import plan_baseline, plan_hap
    from lightning_gpp.spmd.search.find import NoProgramFitsError

    baseline = SPMD_PLANNERS[name]
    try:
        if baseline is None:
            return plan_hap(problem.graph, problem.machine)
        return plan_baseline(problem.graph, problem.machine, baseline)
    except NoProgramFitsError as error:
        return str(error)


def explain_program(config: DictConfig, folder: Path) -> dict[str, float]:
    """The job ``plan`` for HAP: prints the program and why, and writes ``program.json``.

    Returns:
        What a sweep compares plans by.
    """
    from lightning_gpp.jobs.problem.spmd_problem import spmd_problem
    from lightning_gpp.spmd.costs.message_bytes import message_bytes
    from lightning_gpp.spmd.explain import explain_plan
    from lightning_gpp.spmd.program import spmd_program_to_json

    if config.graph is not None:
        raise ValueError(
            f"planner={HAP} needs a model at the level of torch's operators, which the graph "
            f"{config.graph!r} is not: leave out graph=, and give a recipe"
        )
    width = console_width()
    problem = problem_of(config, folder)
    print(f"{problem.describe(max_width=width)}\n", flush=True)
    start_s = time.monotonic()
    question = spmd_problem(config, problem.request)
    plan = program_within(question, HAP, as_limit_s("job.limit_s", config.job.limit_s))
    search_s = time.monotonic() - start_s
    print(f"{_verdict(plan.evaluation, problem.request).text(width)}\n")
    kinds = [device.kind for device in problem.request.cluster.devices]
    text = explain_plan(plan, question.graph, question.machine, kinds=kinds, max_width=width)
    print(f"{text}\n")
    factors = ", ".join(f"{kind} {1 / factor:.2g}" for kind, factor in question.factors.items())
    print(
        wrapped(
            [
                "Computing is priced by flops and bytes, at a part of the devices' speeds with "
                f"which one alone takes as long as its measured operators do ({factors}).",
            ],
            width,
        )
    )
    text = spmd_program_to_json(plan.program)
    (folder / "program.json").write_text(text, encoding="utf-8")
    found = plan.evaluation
    metrics = {
        "step_s": found.step_s,
        "samples_per_s": problem.request.minibatch_size / found.step_s,
        "peak_memory_bytes": float(found.memory_bytes.max()),
        "message_bytes": message_bytes(plan.program, question.graph, question.machine),
        "search_s": search_s,
    }
    save_metrics(metrics, folder)
    print(f"\n{written_to(folder)}")
    return metrics


def _verdict(found: ProgramEvaluation, request: PlanRequest) -> PlanVerdict:
    """A program on all devices beside the one that is fastest alone."""
    return PlanVerdict.beside_one(
        request,
        step_s=found.step_s,
        memory_bytes=round(float(found.memory_bytes.max())),
        busy_s=found.busy_s.tolist(),
    )
