"""The job ``plan``: makes a plan without training, explains it, and writes it to a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from lightning_gpp.cluster.this_machine import CPU, num_cores
from lightning_gpp.common.text_table import wrapped
from lightning_gpp.jobs.files import save_metrics, written_to
from lightning_gpp.jobs.options import as_limit_s
from lightning_gpp.jobs.problem.problem import PlanningProblem, chosen_planner, strategy_option
from lightning_gpp.jobs.problem.problem_of import problem_of
from lightning_gpp.jobs.search import FoundPlan, check_planner, search
from lightning_gpp.jobs.spmd import SPMD_PLANNERS, explain_program
from lightning_gpp.jobs.table import console_width
from lightning_gpp.planner import resolve_plan, save_plan, validate_plan
from lightning_gpp.planner.plan.by_rank import with_devices_of
from lightning_gpp.reports.plan.describe import describe_plan
from lightning_gpp.reports.plan.verdict import PlanVerdict


def run(config: DictConfig, folder: Path) -> dict[str, float]:
    """Makes a plan, prints it and why, and writes ``plan.json`` and ``plan.png``.

    Returns:
        What a sweep compares plans by.
    """
    width, planner = console_width(), chosen_planner(config)
    if planner in SPMD_PLANNERS:
        return explain_program(config, planner, folder)
    check_planner(planner)
    problem = problem_of(config, folder)
    print(f"{problem.describe(max_width=width)}\n", flush=True)
    problem = replace(problem, question=replace(problem.question, compares=True))
    found = chosen_plan(config, problem)
    evaluation = found.evaluation
    save_plan(evaluation.plan, folder / "plan.json")
    print(f"{verdict_of(config, found).text(width)}\n", flush=True)
    print(f"{describe_plan(evaluation, found.request, max_width=width)}\n", flush=True)
    notes = [
        *found.answer.notes,
        f"Searched by the planner {found.planner} in {found.search_s:.2f} s.",
    ]
    if spare := found.request.num_devices - len(evaluation.devices):
        idle = "1 device stays" if spare == 1 else f"{spare} devices stay"
        notes.insert(0, f"Search: {idle} idle: plans with more devices were not faster.")
    print(f"{wrapped(notes, width)}\n", flush=True)
    save_metrics(found.metrics, folder)
    if config.job.picture:
        from lightning_gpp.reports.plan.picture import write_plan_picture

        write_plan_picture(folder / "plan.png", evaluation, found.request, model=problem.name)
    print(written_to(folder))
    return found.metrics


def chosen_plan(config: DictConfig, problem: PlanningProblem) -> FoundPlan:
    """The plan that training would use: of the chosen planner, or made by hand.

    Raises:
        ValueError: there is no such planner or plan, or it found none within the limit of time.
    """
    by_hand, request = strategy_option(config, "plan"), problem.request
    question = replace(problem.question, planner=chosen_planner(config))
    if by_hand is not None:
        plan = resolve_plan(by_hand, request.graph)
        validate_plan(plan, request.graph, request.num_devices)
        question = replace(question, plan=plan, request=with_devices_of(plan, request))
    return search(question, as_limit_s("job.limit_s", config.job.limit_s))


def verdict_of(config: DictConfig, found: FoundPlan) -> PlanVerdict:
    """The gain of a plan over one device."""
    cluster = found.question.request.cluster
    hosts = {device.host for device in cluster.devices}
    is_here = config.graph is None and cluster.kinds == (CPU,) and len(hosts) == 1
    return PlanVerdict.of(
        found.evaluation, found.request, num_cores=num_cores() if is_here else None
    )
