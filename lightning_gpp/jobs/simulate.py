"""The job ``simulate``: a step of a plan as it would run, and what would make it faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from lightning_gpp.common.text_table import wrapped
from lightning_gpp.jobs.console_width import console_width
from lightning_gpp.jobs.files import save_metrics, written_to
from lightning_gpp.jobs.options import as_list
from lightning_gpp.jobs.plan import chosen_plan, chosen_planner
from lightning_gpp.jobs.problem.problem import PlanningProblem, policy_of
from lightning_gpp.jobs.problem.problem_of import problem_of
from lightning_gpp.jobs.search.searched import check_planner
from lightning_gpp.jobs.simulation.levers_text import (
    describe_levers,
    describe_speedups,
    describe_what_if,
)
from lightning_gpp.jobs.simulation.simulated import Simulated
from lightning_gpp.jobs.simulation.simulation_json import save_simulation
from lightning_gpp.jobs.simulation.simulation_options import run_of, what_if_of, with_links
from lightning_gpp.jobs.simulation.simulation_text import describe_simulation
from lightning_gpp.jobs.simulation.speedup import (
    Speedups,
    device_counts,
    find_speedups,
    ssgd_case,
    write_speedup_picture,
)
from lightning_gpp.planner import save_plan
from lightning_gpp.planner.plan.by_rank import in_plan_order
from lightning_gpp.reports.plan.describe import describe_head, describe_shares, describe_stages
from lightning_gpp.reports.step.write_step import write_step
from lightning_gpp.simulate.ssgd.program import Ssgd
from lightning_gpp.simulate.what_if.changes import WhatIf
from lightning_gpp.simulate.what_if.levers import levers
from lightning_gpp.simulate.what_if.plan_case import PlanCase

TWICE = "Twice the devices: with mini-batches of twice the size, and the planner's plan for them."
"""What the lever means."""

MOST_DRAWN = 64
"""Timelines of more devices than these are no pictures any more."""


def run(config: DictConfig, folder: Path) -> dict[str, float]:
    """Simulates, prints what a step does and what would help, and writes figures.

    Returns:
        What a sweep compares simulations by.
    """
    width = console_width()
    what_if = what_if_of(config.what_if)
    problem = changed_links(problem_of(config, folder), config)
    counts = device_counts(problem.request.num_devices, as_list("job.speedup", config.job.speedup))
    policy = policy_of(config)
    if policy is not None:
        counts = []  # samples per device would be others
    before = simulated(config, problem)
    after = changed(before, what_if, replan=config.job.replan)
    metrics = simulation_metrics(after)
    cases = compared(config, after)
    print(f"{problem.describe(max_width=width)}\n", flush=True)
    for text in step_texts(before, after, width):
        print(f"{text}\n", flush=True)
    ranked = {}
    for name, case in cases.items():
        ranked[name] = levers(case)
        print(f"{describe_levers(ranked[name], name, max_width=width)}\n", flush=True)
    if cases:
        print(f"{wrapped([TWICE], width)}\n", flush=True)
    speedups = find_speedups(after.case, counts) if counts else None
    if speedups is not None:
        print(f"{describe_speedups(speedups, max_width=width)}\n", flush=True)
    save_plan(after.case.plan, folder / "plan.json")
    save_metrics(metrics, folder)
    save_simulation(before, after, ranked, speedups, folder)
    if config.job.picture:
        draw(before, after, speedups, folder, weights=policy.name if policy else "")
    print(written_to(folder))
    return metrics


def changed_links(problem: PlanningProblem, config: DictConfig) -> PlanningProblem:
    """The problem with the links that the configuration changes.

    Raises:
        ValueError: a number makes no sense.
    """
    request = problem.request
    cluster = with_links(request.cluster, config.links)
    return replace(problem, request=replace(request, cluster=cluster))


def simulated(config: DictConfig, problem: PlanningProblem) -> Simulated:
    """The plan that training would use, as it would run.

    Raises:
        ValueError: an option makes no sense, or there is no plan.
    """
    check_planner(chosen_planner(config))
    run = run_of(config, problem.request.cluster, problem.request.held_versions.per_update)
    chosen = chosen_plan(config, problem)
    case = PlanCase(
        chosen.evaluation.plan,
        chosen.request,
        run,
        planner=chosen.searched.planner,
        keeps_schedule=problem.schedule is not None,
    )
    return Simulated(case, notes=chosen.searched.plan_notes)


def changed(before: Simulated, what_if: WhatIf, *, replan: bool) -> Simulated:
    """The plan, or the planner's new one, in the changed world.

    Raises:
        ValueError: there is no such device or operator, or no plan.
    """
    case = before.case.changed(what_if)  # checks names, also where nothing changes
    if what_if.is_nothing:
        return before
    if replan:
        cluster = in_plan_order(case.request.cluster)
        again = case.replanned(replace(case.request, cluster=cluster))
        return Simulated(again, what_if.describe())
    return Simulated(case, what_if.describe(), before.notes)


def step_texts(before: Simulated, after: Simulated, width: int) -> Iterator[str]:
    """What a step is and does."""
    request = after.case.request
    yield describe_head(after.evaluation, request, max_width=width)
    if after.notes:
        yield wrapped(after.notes, width)
    yield describe_stages(after.evaluation, request, max_width=width)
    if shares := describe_shares(after.evaluation, max_width=width):
        yield shares
    if after is not before:
        yield describe_what_if(before, after, max_width=width)
    yield from describe_simulation(after, max_width=width)


def compared(config: DictConfig, found: Simulated) -> dict[str, PlanCase | Ssgd]:
    """What levers are shown of: the plan, and S-SGD of the same model."""
    if not config.job.levers:
        return {}
    case = found.case
    cases: dict[str, PlanCase | Ssgd] = {"What would speed up this plan": case}
    if config.job.ssgd is not None and case.request.num_minibatches == 1:
        name = f"What would speed up pure data parallelism (S-SGD, {config.job.ssgd})"
        cases[name] = ssgd_case(case, case.request.num_devices, config.job.ssgd)
    return cases


def simulation_metrics(found: Simulated) -> dict[str, float]:
    """A simulation in numbers, for the table of a sweep."""
    return {
        "step_s": found.step_s,
        "samples_per_s": found.samples_per_s,
        "bubble_share": found.usage.bubble_share,
        "num_stages": found.case.plan.num_stages,
        "peak_memory_bytes": found.peak_memory_bytes,
    }


def draw(
    before: Simulated, after: Simulated, speedups: Speedups | None, folder: Path, *, weights: str
) -> None:
    """Writes the figures, and the timelines, with the policy of weights, as a page and a trace."""
    worlds = [before, after] if after is not before else [after]
    if after.case.request.num_devices <= MOST_DRAWN:
        names = [found.name if len(worlds) > 1 else "" for found in worlds]
        shown = [found.shortened().timeline(name) for found, name in zip(worlds, names)]
        write_step([replace(timeline, weights=weights) for timeline in shown], folder)
    if speedups is not None:
        write_speedup_picture(speedups, folder)
