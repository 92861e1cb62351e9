"""The job ``plan``: plans without training, says why the plan is as it is, and writes it down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from lightning_gpp.cluster.this_machine import CPU, num_cores
from lightning_gpp.common.text_table import wrapped
from lightning_gpp.jobs.console_width import console_width
from lightning_gpp.jobs.files import save_metrics, written_to
from lightning_gpp.jobs.options import as_limit_s, as_list
from lightning_gpp.jobs.problem.problem import PlanningProblem, strategy_option
from lightning_gpp.jobs.problem.problem_of import problem_of
from lightning_gpp.jobs.search.memory_limit import memory_limit_note
from lightning_gpp.jobs.search.searched import Searched, check_planner, search
from lightning_gpp.jobs.side_by_side import compared_side_by_side, describe_side_by_side
from lightning_gpp.jobs.spmd import HAP, explain_program
from lightning_gpp.planner import (
    GRAPHPIPE,
    PLANNERS,
    PlanEvaluation,
    PlanRequest,
    resolve_plan,
    save_plan,
    validate_plan,
)
from lightning_gpp.planner.plan.by_rank import with_devices_of
from lightning_gpp.planner.plan.forks_and_joins import forks_and_joins
from lightning_gpp.planner.plan_to_run import PlanQuestion
from lightning_gpp.reports.plan.describe import describe_plan
from lightning_gpp.reports.plan.explain import (
    describe_alternatives,
    describe_device_columns,
    describe_devices,
)
from lightning_gpp.reports.plan.verdict import PlanVerdict

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
    limit_s = as_limit_s("job.limit_s", config.job.limit_s)
    verdict = verdict_of(config, problem, chosen).text(width)
    for part in explanation(chosen, names, width, verdict, limit_s):
        print(f"{part}\n", flush=True)
    if config.job.side_by_side:
        found = compared_side_by_side(chosen.question, limit_s)
        print(f"{describe_side_by_side(found)}\n", flush=True)
    metrics = plan_metrics(chosen)
    save_metrics(metrics, folder)
    if config.job.picture:
        from lightning_gpp.reports.plan.picture import write_plan_picture

        write_plan_picture(
            folder / "plan.png", chosen.evaluation, chosen.request, model=problem.name
        )
    print(written_to(folder))
    return metrics


@dataclass(frozen=True, slots=True)
class Chosen:
    """The plan to explain.

    Attributes:
        question: what was asked.
        searched: the answer.
        evaluation: what the plan would do.
        request: the question that it answers, with the schedule that runs it.
    """

    question: PlanQuestion
    searched: Searched
    evaluation: PlanEvaluation
    request: PlanRequest

    @property
    def notes(self) -> tuple[str, ...]:
        """How the plan came about."""
        return (*(f"Search: {n}." for n in self.searched.notes), *self.searched.plan_notes)


def chosen_plan(config: DictConfig, problem: PlanningProblem) -> Chosen:
    """The plan that training would use: of the chosen planner, or made by hand.

    Raises:
        ValueError: there is no such planner or plan, or it found none within the limit of time.
    """
    by_hand, request, plan = strategy_option(config, "plan"), problem.request, problem.plan
    if by_hand is not None:
        plan = resolve_plan(by_hand, request.graph)
        validate_plan(plan, request.graph, request.num_devices)
        request = with_devices_of(plan, request)
    question = PlanQuestion(
        request, chosen_planner(config), problem.schedule, problem.uses_all_devices, plan
    )
    searched = search(question, as_limit_s("job.limit_s", config.job.limit_s))
    if searched.evaluation is None or searched.request is None:
        raise ValueError(searched.failure)
    return Chosen(question, searched, searched.evaluation, searched.request)


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


def explanation(
    chosen: Chosen, names: Sequence[str], width: int, verdict: str, limit_s: float | None = None
) -> Iterator[str]:
    """Texts that say what the plan is and why; each is made when it is asked for.

    Args:
        chosen: the plan.
        names: of the planners that it is compared with.
        width: columns of the terminal.
        verdict: the first text.
        limit_s: seconds of each further search.
    """
    found, request, searched = chosen.evaluation, chosen.request, chosen.searched
    again = replace(chosen.question, schedule=request.schedule, uses_all_devices=False, plan=None)
    yield verdict
    yield describe_plan(found, request, max_width=width)
    notes = [*chosen.notes, *forks_and_joins(found.plan, request.graph)]
    notes += memory_limit_note(again, searched, limit_s)
    if notes:
        yield wrapped(notes, width)
    yield describe_devices(found, request, max_width=width)
    yield describe_device_columns(found, max_width=width)
    others = [
        search(replace(again, planner=name), limit_s) for name in names if name != searched.planner
    ]
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
