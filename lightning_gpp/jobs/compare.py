"""The job ``compare``: asks all planners the same question and puts their plans side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_gpp.jobs.comparison import (
    compared,
    describe_comparison,
    describe_comparison_columns,
    write_comparison,
)
from lightning_gpp.jobs.console_width import console_width
from lightning_gpp.jobs.files import written_to
from lightning_gpp.jobs.job_scope import is_sweep
from lightning_gpp.jobs.options import as_limit_s, as_list
from lightning_gpp.jobs.policies import compare_policies
from lightning_gpp.jobs.problem.full_graph_problem import full_graph_planner
from lightning_gpp.jobs.problem.problem import policy_of
from lightning_gpp.jobs.problem.problem_of import full_graph_problem_of, problem_of
from lightning_gpp.jobs.search.searched import search
from lightning_gpp.jobs.spmd import SPMD_PLANNERS, compared_programs
from lightning_gpp.jobs.sweeps.swept_job import split_override
from lightning_gpp.jobs.ways import compare_ways
from lightning_gpp.planner import PLANNERS
from lightning_gpp.planner.plan_to_run import PlanQuestion
from lightning_gpp.reports.plan.describe import describe_source


def run(config: DictConfig, folder: Path) -> dict[str, float]:
    """Prints the table, and writes ``compare.json`` and ``compare.csv``.

    Where the schedule does not drain it compares policies of weights: :mod:`.policies`; where the
    model is called with one graph, numbers of ways: :mod:`.ways`.

    Returns:
        The throughput of every planner that found a plan, in samples per second, by its name.
    """
    if policy_of(config) is not None:
        return compare_policies(config, folder)
    one_graph = full_graph_problem_of(config, folder)
    if one_graph is not None:
        return compare_ways(one_graph, full_graph_planner(config), folder)
    names = planners(config)
    limit_s = as_limit_s("job.limit_s", config.job.limit_s)
    problem = problem_of(config, folder)
    print(f"{problem.describe(max_width=console_width())}\n", flush=True)
    settings = sweep_settings()
    searches = [
        search(PlanQuestion(problem.request, name, problem.schedule), limit_s)
        for name in names
        if name in PLANNERS
    ]
    rows = [compared(found, settings) for found in searches]
    programs = [name for name in names if name in SPMD_PLANNERS]
    if programs:
        rows += compared_programs(config, problem.request, programs, settings, limit_s)
    write_comparison(rows, folder)
    width = console_width()
    table = describe_comparison(rows, max_width=width)
    print(table)
    source = describe_source(problem.request)
    schedules = {row.schedule for row in rows if row.schedule}
    print(f"\n{describe_comparison_columns(table, source, schedules, max_width=width)}")
    print(f"\n{written_to(folder)}")
    return {row.planner: row.samples_per_s for row in rows if row.samples_per_s is not None}


def planners(config: DictConfig) -> Sequence[str]:
    """The planners to compare: those asked for, or all that know the model.

    Raises:
        ValueError: there is none of a name.
    """
    asked = as_list("job.planners", config.job.planners)
    known = [*PLANNERS, *(SPMD_PLANNERS if config.graph is None else ())]
    names = known if asked is None else asked
    if not names:
        raise ValueError("job.planners: expected at least one planner, or null for all")
    for name in names:
        if name in SPMD_PLANNERS and name not in known:
            raise ValueError(
                f"job.planners: {name} makes programs of torch's operators, which the graph "
                f"{config.graph!r} does not have; leave out graph=, and give a recipe"
            )
        if name not in known:
            raise ValueError(f"unknown planner {name!r}; known planners: {', '.join(known)}")
    return names


def sweep_settings() -> dict[str, str]:
    """The overrides of this job of a sweep, name -> value; none in a single run."""
    if not is_sweep():
        return {}
    return dict(split_override(text) for text in HydraConfig.get().overrides.task)
