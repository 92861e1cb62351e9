"""Programs that run on all devices at once (HAP), planned and explained."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from lightning_gpp.common.text_table import wrapped
from lightning_gpp.jobs.files import save_metrics, written_to
from lightning_gpp.jobs.options import as_limit_s
from lightning_gpp.jobs.problem.problem_of import problem_of
from lightning_gpp.jobs.search import call_within
from lightning_gpp.jobs.table import console_width
from lightning_gpp.reports.plan.verdict import PlanVerdict

if TYPE_CHECKING:
    from lightning_gpp.jobs.problem.spmd_problem import SpmdProblem
    from lightning_gpp.spmd.search.find import SpmdPlan

# Programs need torch to export a model; the jobs that plan graphs of files do without.

SPMD_PLANNERS: Mapping[str, str | None] = {
    "hap": None,
    "even_shares": "DP-EV",
    "shares_by_speed": "DP-CP",
    "sharded_data_parallel": "ZeRO",
}
"""Planners of SPMD programs by name: HAP, and what it was compared with, as the paper calls it."""


def check_spmd(config: DictConfig, what: str) -> None:
    """Refuses a planner of SPMD programs where there are no operators of torch.

    Raises:
        ValueError: the question is about the graph of a file.
    """
    if config.graph is not None:
        raise ValueError(
            f"{what} makes programs of torch's operators, which the graph {config.graph!r} does "
            "not have; leave out graph=, and give a recipe"
        )


def program_within(
    problem: SpmdProblem, name: str, minibatch_size: int, limit_s: float | None
) -> tuple[SpmdPlan, dict[str, float]]:
    """The program of a planner, and what it does in numbers.

    Args:
        problem: the question.
        name: of :data:`SPMD_PLANNERS`.
        minibatch_size: samples of a step.
        limit_s: seconds after which the search is ended; None: never.

    Raises:
        ValueError: none fits, or none was found within the limit.
    """
    from lightning_gpp.spmd.costs.prices import message_bytes

    start_s = time.monotonic()
    plan = call_within(limit_s, _search_program, problem, name)
    search_s, found = time.monotonic() - start_s, plan.evaluation
    return plan, {
        "step_s": found.step_s,
        "samples_per_s": minibatch_size / found.step_s,
        "peak_memory_bytes": round(float(found.memory_bytes.max())),
        "message_bytes": message_bytes(plan.program, problem.graph, problem.machine),
        "search_s": search_s,
    }


def _search_program(problem: SpmdProblem, name: str) -> SpmdPlan:
    from lightning_gpp.spmd.plan import plan_baseline, plan_hap

    baseline = SPMD_PLANNERS[name]
    if baseline is None:
        return plan_hap(problem.graph, problem.machine)
    return plan_baseline(problem.graph, problem.machine, baseline)


def explain_program(config: DictConfig, name: str, folder: Path) -> dict[str, float]:
    """The job ``plan`` for SPMD: prints the program and why, and writes ``program.json``.

    Returns:
        What a sweep compares plans by.
    """
    from lightning_gpp.jobs.problem.spmd_problem import spmd_problem
    from lightning_gpp.spmd.explain import explain_plan
    from lightning_gpp.spmd.program import spmd_program_to_json

    check_spmd(config, f"planner={name}")
    width = console_width()
    problem = problem_of(config, folder)
    request = problem.request
    print(f"{problem.describe(max_width=width)}\n", flush=True)
    question, limit_s = spmd_problem(config, request), as_limit_s("job.limit_s", config.job.limit_s)
    plan, metrics = program_within(question, name, request.minibatch_size, limit_s)
    verdict = PlanVerdict.beside_one(
        request,
        step_s=plan.evaluation.step_s,
        memory_bytes=round(metrics["peak_memory_bytes"]),
        num_devices=len(plan.evaluation.busy_s),
    )
    kinds = [device.kind for device in request.cluster.devices]
    factors = ", ".join(f"{kind} {1 / factor:.2g}" for kind, factor in question.factors.items())
    prices = (
        "Compute is priced by FLOPs and bytes, with the devices' speeds scaled so that one device "
        f"alone takes as long as its measured operators ({factors})."
    )
    text = explain_plan(plan, question.graph, question.machine, kinds=kinds, max_width=width)
    print(f"{verdict.text(width)}\n\n{text}\n\n{wrapped([prices], width)}")
    program = spmd_program_to_json(plan.program)
    (folder / "program.json").write_text(program, encoding="utf-8")
    save_metrics(metrics, folder)
    print(f"\n{written_to(folder)}")
    return metrics
