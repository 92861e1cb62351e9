"""The job ``plan``: plans without training, says why the plan is as it is, and writes it down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from lightning_gpp.cluster.this_machine import CPU, num_cores
from lightning_gpp.jobs.console_width import console_width
from lightning_gpp.jobs.files import save_metrics, written_to
from lightning_gpp.jobs.options import as_list
from lightning_gpp.jobs.problem.problem import PlanningProblem, strategy_option
from lightning_gpp.jobs.problem.problem_of import problem_of
from lightning_gpp.jobs.search.memory_limit import memory_limit_note
from lightning_gpp.jobs.search.searched import Searched, check_planner, search
from lightning_gpp.jobs.side_by_side import compared_side_by_side, describe_side_by_side
from lightning_gpp.jobs.spmd import HAP, explain_program
from lightning_gpp.planner import (
    GRAPHPIPE,
    PLANNERS,
    Plan,
    PlanEvaluation,
    PlanRequest,
    by_rank,
    choose_schedule,
    evaluate_plan,
    on_all_devices,
    resolve_plan,
    save_plan,
    validate_plan,
)
from lightning_gpp.planner.graphpipe import SearchResult
from lightning_gpp.planner.plan.forks_and_joins import forks_and_joins
from lightning_gpp.reports import PlanVerdict, describe_plan
from lightning_gpp.reports.plan.explain import (
    describe_alternatives,
    describe_device_columns,
    describe_devices,
)
from lightning_gpp.text_table import wrapped

QUICK_PLANNERS = ("graphpipe", "sequential")
"""Planners that take no longer than a person waits; others are asked on request."""


def run(config: DictConfig, folder: Path) -> dict[str, float]:
    """Plans, prints the plan and why, and writes ``plan.json`` and ``plan.png``.

    Returns:
        What a sweep compares plans by.
    """
    width = console_width()
    if chosen_planner(config) == HAP:
        return explain_program(config, folder)
    names = planners(config)
    problem = problem_of(config, folder)
    print(f"{problem.describe(max_width=width)}\n", flush=True)
    chosen = chosen_plan(config, problem)
    save_plan(chosen.evaluation.plan, folder / "plan.json")
    for part in explanation(chosen, names, width, verdict_of(config, problem, chosen).text(width)):
        print(f"{part}\n", flush=True)
    if config.job.side_by_side:
        found = compared_side_by_side(chosen_planner(config), problem)
        print(f"{describe_side_by_side(found)}\n", flush=True)
    metrics = plan_metrics(chosen)
    save_metrics(metrics, folder)
    if config.job.picture:
        from lightning_gpp.reports.plan.plan_picture import write_plan_picture

        write_plan_picture(
            folder / "plan.png", chosen.evaluation, chosen.request, model=problem.name
        )
    print(written_to(folder))
    return metrics


@dataclass(frozen=True, slots=True)
class Chosen:
    """The plan to explain.

    Attributes:
        evaluation: what it would do.
        request: the question that it answers, with the schedule that runs it.
        searched: the answer of the planner that made it.
        notes: how it came about.
    """

    evaluation: PlanEvaluation
    request: PlanRequest
    searched: Searched
    notes: tuple[str, ...] = ()


def chosen_plan(config: DictConfig, problem: PlanningProblem) -> Chosen:
    """The plan that training would use: of the chosen planner, or made by hand.

    Devices of a planner's plan are numbered as the ranks that they would be.

    Raises:
        ValueError: there is no such planner or plan, or it found none.
    """
    request = problem.request
    by_hand = strategy_option(config, "plan")
    if by_hand is not None:
        return _by_hand(resolve_plan(by_hand, request.graph), problem)
    if problem.plan is not None:
        return _by_hand(problem.plan, problem)
    searched = search(chosen_planner(config), request, problem.schedule)
    found = searched.evaluation
    if found is None:
        raise ValueError(searched.failure)
    request = request.scheduled(searched.schedule)
    notes = (*(f"Search: {note}." for note in searched.notes), *searched.schedule_notes)
    if problem.uses_all_devices and (fuller := on_all_devices(found.plan, request)) != found.plan:
        from lightning_gpp.strategy.planning.planning import why_fuller

        notes = (*notes, why_fuller(found.plan, fuller, request))
        found = evaluate_plan(fuller, request)
    plan, request = by_rank(found.plan, request)
    return Chosen(evaluate_plan(plan, request), request, searched, notes)


def _by_hand(plan: Plan, problem: PlanningProblem) -> Chosen:
    """A plan that somebody made, with the schedule that runs it."""
    validate_plan(plan, problem.request.graph, problem.request.num_devices)
    answered = choose_schedule(problem.request, problem.schedule, lambda _: SearchResult(plan))
    evaluation = evaluate_plan(plan, answered.request)
    searched = Searched(
        plan.planner,
        evaluation,
        search_s=0.0,
        schedule=answered.request.schedule,
        schedule_notes=answered.notes,
    )
    return Chosen(evaluation, answered.request, searched, answered.notes)


def verdict_of(config: DictConfig, problem: PlanningProblem, chosen: Chosen) -> PlanVerdict:
    """What the plan gains over one device; for processes here, with what one of them measures."""
    cluster = problem.request.cluster
    hosts = {device.host for device in cluster.devices}
    is_here = config.graph is None and cluster.kinds == (CPU,) and len(hosts) == 1
    cores = num_cores() if is_here else None
    verdict = PlanVerdict.of(chosen.evaluation, chosen.request, num_cores=cores)
    if not is_here or verdict.num_devices == 1 or config.costs is not None:
        return verdict
    from lightning_gpp.jobs.problem.alone import batches_alone

    alone = batches_alone(config, cluster, verdict.one_device_s)
    return verdict if alone is None else replace(verdict, own_s=alone.own_s)


def explanation(chosen: Chosen, names: Sequence[str], width: int, verdict: str) -> Iterator[str]:
    """Texts that say what the plan is and why; each is made when it is asked for."""
    found, request, searched = chosen.evaluation, chosen.request, chosen.searched
    yield verdict
    yield describe_plan(found, request, max_width=width)
    notes = [*chosen.notes, *forks_and_joins(found.plan, request.graph)]
    notes += memory_limit_note(searched, request)
    if notes:
        yield wrapped(notes, width)
    yield describe_devices(found, request, max_width=width)
    yield describe_device_columns(found, max_width=width)
    others = [search(name, request, request.schedule) for name in names if name != searched.planner]
    rows = [*searched.next_alternatives(), *(other.as_alternative() for other in others)]
    if rows:
        yield describe_alternatives(found, rows, max_width=width)
    yield "searched: " + ", ".join(f"{s.planner} {s.search_s:.2f} s" for s in (searched, *others))


def planners(config: DictConfig) -> Sequence[str]:
    """The planners to compare with; the chosen one may be among them.

    Raises:
        ValueError: there is none of a name.
    """
    asked = as_list("job.alternatives", config.job.alternatives)
    names = [name for name in QUICK_PLANNERS if name in PLANNERS] if asked is None else asked
    for name in (chosen_planner(config), *names):
        check_planner(name)
    return names


def chosen_planner(config: DictConfig) -> str:
    """The planner that training would ask."""
    return str(strategy_option(config, "planner") or config.planner or GRAPHPIPE)


def plan_metrics(chosen: Chosen) -> dict[str, float]:
    """A plan in numbers, for the table of a sweep."""
    evaluation = chosen.evaluation
    return {
        "step_s": evaluation.minibatch_s,
        "samples_per_s": evaluation.throughput,
        "seconds_per_sample": evaluation.seconds_per_sample,
        "num_stages": evaluation.plan.num_stages,
        "depth": evaluation.depth,
        "peak_memory_bytes": evaluation.peak_memory_bytes,
        "search_s": chosen.searched.search_s,
    }
