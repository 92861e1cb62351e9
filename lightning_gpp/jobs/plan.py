"""The job ``plan``: plans without training, says why the plan is as it is, and writes it down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from lightning_gpp.jobs.console_width import console_width
from lightning_gpp.jobs.files import save_metrics, written_to
from lightning_gpp.jobs.problem import problem_of, strategy_option
from lightning_gpp.jobs.searched import Searched, check_planner, search
from lightning_gpp.planner import (
    PLANNERS,
    PlanEvaluation,
    PlanRequest,
    describe_plan,
    evaluate_plan,
    resolve_plan,
    save_plan,
    validate_plan,
)
from lightning_gpp.planner.explain import describe_alternatives, describe_devices
from lightning_gpp.planner.forks_and_joins import forks_and_joins
from lightning_gpp.planner.text_table import wrapped

QUICK_PLANNERS = ("graphpipe", "sequential", "balanced")
"""Planners that take no longer than a person waits; others are asked on request."""


def run(config: DictConfig, folder: Path) -> dict[str, float]:
    """Plans, prints the plan and why, and writes ``plan.json`` and ``plan.png``.

    Returns:
        What a sweep compares plans by.
    """
    width = console_width()
    names = planners(config)
    problem = problem_of(config, folder)
    request = problem.request
    print(f"{problem.describe(max_width=width)}\n", flush=True)
    searched, evaluation = chosen_plan(config, request)
    save_plan(evaluation.plan, folder / "plan.json")
    print(describe_plan(evaluation, request, max_width=width), flush=True)
    notes = [
        *forks_and_joins(evaluation.plan, request.graph),
        *(f"Search: {note}." for note in searched.notes),
    ]
    if notes:
        print(f"\n{wrapped(notes, width)}", flush=True)
    print(f"\n{describe_devices(evaluation, request, max_width=width)}", flush=True)
    others = [search(name, request) for name in names if name != searched.planner]
    rows = [*searched.next_alternatives(), *(other.as_alternative() for other in others)]
    if rows:
        print(f"\n{describe_alternatives(evaluation, rows, max_width=width)}", flush=True)
    seconds = ", ".join(f"{s.planner} {s.search_s:.2f} s" for s in (searched, *others))
    print(f"\nsearched: {seconds}", flush=True)
    metrics = plan_metrics(evaluation, searched.search_s)
    save_metrics(metrics, folder)
    if config.job.picture:
        from lightning_gpp.planner.plan_picture import write_plan_picture

        write_plan_picture(folder / "plan.png", evaluation, request)
    print(written_to(folder))
    return metrics


def chosen_plan(config: DictConfig, request: PlanRequest) -> tuple[Searched, PlanEvaluation]:
    """The plan of the chosen planner, or the one made by hand.

    Raises:
        ValueError: there is no such planner or plan, or it found none.
    """
    by_hand = strategy_option(config, "plan")
    if by_hand is not None:
        plan = resolve_plan(by_hand, request.graph)
        validate_plan(plan, request.graph, request.num_devices)
        evaluation = evaluate_plan(plan, request)
        return Searched(plan.planner, evaluation, search_s=0.0), evaluation
    searched = search(chosen_planner(config), request)
    if searched.evaluation is None:
        raise ValueError(searched.failure)
    return searched, searched.evaluation


def planners(config: DictConfig) -> Sequence[str]:
    """The planners to compare with; the chosen one may be among them.

    Raises:
        ValueError: there is none of a name.
    """
    asked: ListConfig | None = config.job.alternatives
    names = [name for name in QUICK_PLANNERS if name in PLANNERS] if asked is None else list(asked)
    for name in (chosen_planner(config), *names):
        check_planner(name)
    return names


def chosen_planner(config: DictConfig) -> str:
    """The planner that training would ask."""
    return str(strategy_option(config, "planner") or config.planner)


def plan_metrics(evaluation: PlanEvaluation, search_s: float) -> dict[str, float]:
    """A plan in numbers, for the table of a sweep."""
    return {
        "step_s": evaluation.step_s,
        "samples_per_s": evaluation.throughput,
        "seconds_per_sample": evaluation.seconds_per_sample,
        "num_stages": evaluation.plan.num_stages,
        "depth": evaluation.depth,
        "peak_memory_bytes": evaluation.peak_memory_bytes,
        "search_s": search_s,
    }
