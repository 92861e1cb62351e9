"""The job ``simulate``: simulates a step of a plan, and what would make it faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_gpp.common.text_table import wrapped
from lightning_gpp.common.units_of_measure import count_text
from lightning_gpp.jobs.files import save_json, save_metrics, written_to
from lightning_gpp.jobs.options import as_flag
from lightning_gpp.jobs.plan import chosen_plan
from lightning_gpp.jobs.problem.problem import PlanningProblem, chosen_planner, policy_of
from lightning_gpp.jobs.problem.problem_of import problem_of
from lightning_gpp.jobs.search import check_planner
from lightning_gpp.jobs.simulation_text import (
    channels_of,
    describe_changes,
    describe_simulation,
    describe_speedups,
)
from lightning_gpp.jobs.spmd import SPMD_PLANNERS
from lightning_gpp.jobs.table import console_width
from lightning_gpp.planner import save_plan
from lightning_gpp.planner.data_parallel import NAME as DATA_PARALLEL
from lightning_gpp.planner.plan_to_run import PlanQuestion, plan_to_run
from lightning_gpp.reports.plan.describe import describe_head, describe_stages
from lightning_gpp.reports.step.write_step import write_step
from lightning_gpp.simulate import critical_path, shares
from lightning_gpp.simulate.program_costs import StepCosts
from lightning_gpp.simulate.ssgd import VARIANTS
from lightning_gpp.simulate.what_if import Case, levers

LEVERS = "What would speed up this plan"

MOST_DRAWN = 64
"""Timelines of more devices than these are no pictures any more."""

MOST_SHOWN = 12
"""Mini-batches that overlap in a picture."""


def run(config: DictConfig, folder: Path) -> dict[str, float]:
    """Simulates a step, prints what it does and what would help, and writes figures.

    Returns:
        What a sweep compares simulations by.
    """
    width, planner, policy = console_width(), chosen_planner(config), policy_of(config)
    if planner in SPMD_PLANNERS:
        raise ValueError(
            f"planner={planner} makes programs of torch's operators, which job=simulate does not "
            f"simulate; job=plan planner={planner} predicts and explains one, and job=compare puts "
            "it beside plans of pipelines"
        )
    check_planner(planner)
    problem = problem_of(config, folder)
    num_devices = problem.request.num_devices
    has_table = as_flag("job.speedup", config.job.speedup) and policy is None
    factors: dict[str, Any] = OmegaConf.to_container(config.what_if)  # type: ignore[assignment]
    before, notes = case_of(config, problem)
    after = before.changed(factors)
    what_if = ", ".join(f"{name} x{f:g}" for name, f in factors.items() if f != 1)
    worlds = {"as it is": before, what_if: after} if what_if else {"": after}
    changes = [as_json(case, before) | {"name": name} for name, case in worlds.items()]

    print(f"{problem.describe(max_width=width)}\n", flush=True)
    texts = [describe_head(after.evaluation, after.request, max_width=width)]
    texts += [wrapped(notes, width)] if notes else []
    texts.append(describe_stages(after.evaluation, after.request, max_width=width))
    texts += [describe_changes(changes, max_width=width)] if what_if else []
    texts += describe_simulation(after, max_width=width)
    print("\n\n".join(texts), flush=True)
    ranked = levers(after) if config.job.levers else []
    if ranked:
        print(f"\n{LEVERS}\n{describe_changes(ranked, max_width=width)}", flush=True)
    speedup = speedups(after) if has_table else None
    if speedup is not None:
        print(f"\n{describe_speedups(speedup, max_width=width)}", flush=True)

    step = changes[-1]
    metrics = {name: step[name] for name in ("step_s", "samples_per_s", "bubble_share")} | {
        "num_stages": after.plan.num_stages,
        "peak_memory_bytes": max(device["peak_bytes"] for device in step["devices"]),
    }
    data = {
        "what_if": what_if or None,
        "before": changes[0] if what_if else None,
        "step": step,
        "levers": ranked,
        "speedup": speedup,
    }
    save_plan(after.plan, folder / "plan.json")
    save_metrics(metrics, folder)
    save_json(data, folder / "simulation.json")
    if config.job.picture and num_devices <= MOST_DRAWN:
        weights = policy.name if policy else ""
        shown = {name: drawn(case).timeline for name, case in worlds.items()}
        write_step([replace(t, name=n, weights=weights) for n, t in shown.items()], folder)
    print(f"\n{written_to(folder)}")
    return metrics


def case_of(config: DictConfig, problem: PlanningProblem) -> tuple[Case, Sequence[str]]:
    """The plan that training would use, as it would run, and notes on it.

    Raises:
        ValueError: there is no plan.
    """
    found, request = chosen_plan(config, problem), problem.request
    plan, step = found.evaluation.plan, StepCosts()
    if problem.refit is not None:
        step = problem.refit.step_costs(plan)
    step = replace(step, per_update=request.held_versions.per_update)
    return Case(plan, found.request, step), found.answer.notes


def drawn(case: Case) -> Case:
    """The case with as many overlapping mini-batches as can be shown."""
    request, count = case.request, case.request.num_minibatches
    if count <= MOST_SHOWN:
        return case
    size = request.minibatch_size // count * MOST_SHOWN
    request = replace(request, minibatch_size=size, num_microbatches=MOST_SHOWN)
    return replace(case, request=request)


def as_json(case: Case, before: Case) -> dict[str, Any]:
    """A simulation in plain numbers, and what it gains over another."""
    path_s: dict[str, float] = {}
    for step in critical_path(case.simulation):
        kind = step.task.kind.value
        path_s[kind] = path_s.get(kind, 0.0) + step.duration_s
    found = shares(case.timeline)
    return {
        "planner": case.plan.planner,
        "step_s": case.step_s,
        "samples": case.request.minibatch_size,
        "samples_per_s": case.samples_per_s,
        "gain": None if case is before else case.samples_per_s / before.samples_per_s - 1,
        "bubble_share": found.bubble_share,
        "critical_path_s": path_s,
        "devices": [
            {**one.seconds, "peak_bytes": memory.peak_bytes, "limit_bytes": memory.limit_bytes}
            for one, memory in zip(found.ranks, case.timeline.memory)
        ],
        "channels": channels_of(case),
    }


def speedups(case: Case) -> dict[str, Any]:
    """Throughput of the plan, and of S-SGD on 1, 2, 4, … and all devices, for as many samples each.

    Of pipelines with versions of weights samples per device would be others.
    """
    num_devices = case.request.num_devices
    counts = sorted({*(2**power for power in range(num_devices.bit_length())), num_devices})

    def ssgd(count: int, variant: str) -> float:
        samples = case.request.minibatch_size * count / num_devices
        return samples / case.ssgd(count, variant).step_s

    alone, notes = ssgd(1, "naive"), list[str]()
    hosts = [device.host for device in case.request.cluster.devices]
    if num_devices > (of_one_host := hosts.count(hosts[0])):
        notes.append(f"More than {count_text(of_one_host, 'device')} are on several hosts.")
    try:
        plan_to_run(PlanQuestion(case.request, DATA_PARALLEL))
    except ValueError as error:
        notes.append(f"S-SGD is computed as if memory had no limit: {error}.")
    others = {name: {count: ssgd(count, name) / alone for count in counts} for name in VARIANTS}
    return {
        "one_device_samples_per_s": alone,
        "speedup": {"this plan": {num_devices: case.samples_per_s / alone}, **others},
        "notes": notes,
    }
