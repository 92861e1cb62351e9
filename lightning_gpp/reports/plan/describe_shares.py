"""How replicas divide a micro-batch, where they do not divide it equally."""

from __future__ import annotations

from itertools import groupby

from lightning_gpp.common.text_table import wrapped
from lightning_gpp.common.units_of_measure import (
    devices_text,
    percent_text,
    samples_text,
    seconds_text,
)
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, StageEvaluation


def describe_shares(evaluation: PlanEvaluation, *, max_width: int = 100) -> str:
    """Of every stage with unequal shares, what its devices take and for how long; or nothing."""
    stages = [found for found in evaluation.stages if len(set(found.stage.shares)) > 1]
    return "\n".join(wrapped([_sentence(found)], max_width) for found in stages)


def shares_text(found: StageEvaluation) -> str:
    """Samples of the replicas of a stage in a row: ``2 × 13 + 2 × 3``."""
    runs = [(units, len([*run])) for units, run in groupby(found.stage.replica_multiples)]
    sizes = [(samples_text(_samples(found, units)), count) for units, count in runs]
    return " + ".join(f"{count} × {size}" if count > 1 else size for size, count in sizes)


def _samples(found: StageEvaluation, units: int) -> float:
    return found.microbatch_size * units / found.stage.microbatch_multiple


def _sentence(found: StageEvaluation) -> str:
    replicas = zip(found.stage.devices, found.stage.shares, found.replicas, strict=True)
    parts = []
    for (units, compute_s), run in groupby(replicas, key=lambda one: (one[1], one[2].compute_s)):
        devices = tuple(device for device, _, _ in run)
        each = " each" if len(devices) > 1 else ""
        share = percent_text(units, found.stage.microbatch_multiple)
        parts.append(
            f"{samples_text(_samples(found, units))}{each} on {devices_text(devices)} "
            f"({share}, {seconds_text(compute_s)})"
        )
    return (
        f"Shares of stage {found.stage.id}, samples of a micro-batch and compute: "
        f"{'; '.join(parts)}."
    )
