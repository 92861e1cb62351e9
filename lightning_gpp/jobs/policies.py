"""The job ``compare`` where the schedule does not drain: policies of weights side by side.

What a step takes and what stages hold is predicted for every policy; a recipe is trained with each
of them, too, from the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lightning_gpp.common.text_table import text_table, wrapped
from lightning_gpp.common.units_of_measure import bytes_text, number_text, seconds_text
from lightning_gpp.jobs.console_width import console_width
from lightning_gpp.jobs.files import written_to
from lightning_gpp.jobs.options import as_flag, as_list
from lightning_gpp.jobs.plan import chosen_plan
from lightning_gpp.jobs.problem.problem import PlanningProblem, per_update_of, with_policy
from lightning_gpp.jobs.problem.problem_of import problem_without_policy
from lightning_gpp.jobs.table_files import cell, save_rows
from lightning_gpp.simulate import simulate_plan
from lightning_gpp.simulate.usage import usage
from lightning_gpp.weights.policies import POLICIES, Policy, find_policy

COLUMNS = (
    "Step: of one mini-batch, simulated with each policy's own plan; flush drains after every one.",
    "Versions: copies of its parameters that a stage holds at most. Memory: simulated, of the "
    "fullest device.",
    "Trained: median seconds of a step of the last epoch on this machine, and the final metrics; "
    "from one seed, so "
    "small differences mean nothing.",
)


@dataclass(frozen=True, slots=True)
class ComparedPolicy:
    """What training with a policy does, in plain numbers; None where it is not known.

    Attributes:
        policy: its name.
        step_s: predicted seconds of a mini-batch.
        samples_per_s: throughput, predicted.
        versions: copies of its parameters that a stage holds at most.
        peak_memory_bytes: of the fullest device, predicted.
        trained_step_s: seconds of a step, measured.
        metrics: final metrics of the training.
        error: why there is no plan, or no training.
    """

    policy: str
    step_s: float | None = None
    samples_per_s: float | None = None
    versions: int | None = None
    peak_memory_bytes: float | None = None
    trained_step_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


def compare_policies(config: DictConfig, folder: Path) -> dict[str, float]:
    """Prints the table, and writes ``policies.json`` and ``policies.csv``.

    Returns:
        The predicted throughput with every policy, in samples per second, by its name.
    """
    policies = asked_policies(config)
    trains = as_flag("job.train", config.job.train) and config.graph is None
    problem = problem_without_policy(config, folder)
    print(f"{problem.describe(max_width=console_width())}\n", flush=True)
    rows = [compared_policy(config, problem, policy, trains=trains) for policy in policies]
    save_rows(rows, folder, "policies")
    width = console_width()
    print(describe_policies(rows, max_width=width))
    print(f"\n{wrapped(COLUMNS if trains else COLUMNS[:-1], width)}")
    print(f"\n{written_to(folder)}")
    return {row.policy: row.samples_per_s for row in rows if row.samples_per_s is not None}


def asked_policies(config: DictConfig) -> Sequence[Policy]:
    """The policies to compare: those asked for, or all.

    Raises:
        ValueError: there is none of a name.
    """
    asked = as_list("job.weights", config.job.weights)
    if asked == []:
        raise ValueError("job.weights: expected at least one policy, or null for all")
    return [find_policy(str(name)) for name in asked or POLICIES]


def compared_policy(
    config: DictConfig, problem: PlanningProblem, policy: Policy, *, trains: bool
) -> ComparedPolicy:
    """The row of a policy; what cannot be had is an answer, too."""
    per_update = per_update_of(config)
    try:
        chosen = chosen_plan(config, with_policy(problem, policy, per_update))
    except ValueError as failure:
        return ComparedPolicy(policy.name, error=str(failure))
    request = chosen.request
    simulation = simulate_plan(chosen.evaluation.plan, request)
    held = [request.held_versions.of(stage.in_flight) for stage in chosen.evaluation.stages]
    step_s, metrics = None, dict[str, float]()
    most_ahead = max(stage.in_flight for stage in chosen.evaluation.stages) - 1
    error = policy.why_not(per_update, most_ahead) or ""
    if trains and not error:
        try:
            step_s, metrics = trained(config, policy)
        except (ValueError, NotImplementedError) as failure:
            error = str(failure)
    return ComparedPolicy(
        policy.name,
        step_s=simulation.minibatch_s,
        samples_per_s=request.minibatch_size / simulation.step_s,
        versions=max(held),
        peak_memory_bytes=max(device.peak_bytes for device in usage(simulation).devices),
        trained_step_s=step_s,
        metrics=metrics,
        error=error,
    )


def trained(config: DictConfig, policy: Policy) -> tuple[float | None, dict[str, float]]:
    """Trains the recipe: seconds of a step, None where there were too few, and its metrics."""
    from lightning_gpp.jobs.step_watch import SECONDS, StepWatch
    from lightning_gpp.jobs.train import train

    asked = OmegaConf.merge(config, {"strategy": {"weights": policy.name}})
    assert isinstance(asked, DictConfig)
    metrics = train(asked, [StepWatch()])
    return metrics.pop(SECONDS, None), metrics


def describe_policies(rows: Sequence[ComparedPolicy], *, max_width: int = 100) -> str:
    """A table with a row per policy."""
    columns = {name: cells for name, cells in _columns(rows) if any(cells)}
    cells = [list(row) for row in zip(*columns.values(), strict=True)]
    flexible = "error" if "error" in columns else None
    left = {"policy", "error"}
    return text_table([*columns], cells, left=left, flexible=flexible, max_width=max_width)


def _columns(rows: Sequence[ComparedPolicy]) -> Iterator[tuple[str, list[str]]]:
    yield "policy", [row.policy for row in rows]
    yield "step", [cell(row.step_s, seconds_text) for row in rows]
    yield "samples/s", [cell(row.samples_per_s, number_text) for row in rows]
    yield "versions", [cell(row.versions, str) for row in rows]
    yield "memory", [cell(row.peak_memory_bytes, bytes_text) for row in rows]
    yield "trained\nstep", [cell(row.trained_step_s, seconds_text) for row in rows]
    for name in _metric_names(rows):
        yield name, [cell(row.metrics.get(name), lambda value: f"{value:.4g}") for row in rows]
    yield "error", [row.error.replace("\n", " ") for row in rows]


def _metric_names(rows: Sequence[ComparedPolicy]) -> list[str]:
    """Of validation where there are such, else all."""
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    return [name for name in names if name.startswith("val")] or names
