"""The job ``compare`` where the schedule does not drain: policies of weights side by side.

What a step takes and what stages hold is predicted for every policy; a recipe is trained with each
of them, too, from the same seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_gpp.common.text_table import wrapped
from lightning_gpp.common.units_of_measure import bytes_text, number_text, seconds_text
from lightning_gpp.jobs.files import written_to
from lightning_gpp.jobs.options import as_flag, as_list
from lightning_gpp.jobs.plan import chosen_plan
from lightning_gpp.jobs.problem.problem import PlanningProblem, per_update_of, with_policy
from lightning_gpp.jobs.problem.problem_of import problem_without_policy
from lightning_gpp.jobs.table import Cell, Row, cell, console_width, describe_rows, save_rows
from lightning_gpp.simulate import simulate_plan
from lightning_gpp.weights.policies import POLICIES, Policy, find_policy

COLUMNS = (
    "Step: of one mini-batch, simulated with each policy's own plan; flush drains after every one.",
    "Versions: copies of its parameters that a stage holds at most. Memory: simulated, of the "
    "fullest device.",
    "Trained: median seconds of a step of the last epoch on this machine, and the final metrics; "
    "from one seed, so "
    "small differences mean nothing.",
)

NUMBERS = ("step_s", "samples_per_s", "versions", "peak_memory_bytes", "trained_step_s")


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
    print(f"\n{wrapped(COLUMNS if trains else COLUMNS[:-1], width)}")
    print(f"\n{written_to(folder)}")
    return {row["policy"]: row["samples_per_s"] for row in rows if row["samples_per_s"] is not None}


def _metric(name: str) -> Cell:
    return lambda row: f"{row['metrics'][name]:.4g}" if name in row["metrics"] else ""


def compared_policy(
    config: DictConfig, problem: PlanningProblem, policy: Policy, *, trains: bool
) -> Row:
    """The row of a policy; what cannot be had is an answer, too."""
    per_update = per_update_of(config)
    row: dict[str, Any] = {"policy": policy.name, **dict.fromkeys(NUMBERS)}
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
