"""A simulation as a file of plain numbers: seconds, bytes, samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_gpp.jobs.files import save_json
from lightning_gpp.jobs.simulation.simulated import Simulated
from lightning_gpp.jobs.simulation.speedup import Speedups
from lightning_gpp.simulate.simulation import TaskKind
from lightning_gpp.simulate.usage import Usage
from lightning_gpp.simulate.what_if.levers import Lever

FILE = "simulation.json"
TRANSFERS = (TaskKind.TRANSFER, TaskKind.REDUCE)


def save_simulation(
    before: Simulated,
    after: Simulated,
    ranked: Mapping[str, Sequence[Lever]],
    speedups: Speedups | None,
    folder: Path,
) -> None:
    """Writes what the job prints.

    Args:
        before: the step as it is.
        after: in the changed world; the same where nothing is changed.
        ranked: what the levers are of -> levers.
        speedups: throughput against the number of devices, where that was asked for.
        folder: where the file is written.
    """
    data = {
        "what_if": None if after is before else after.name,
        "before": None if after is before else _step(before),
        "step": _step(after),
        "levers": {name: [asdict(lever) for lever in found] for name, found in ranked.items()},
        "speedup": None if speedups is None else _speedups(speedups),
    }
    save_json(data, folder / FILE)


def _step(found: Simulated) -> dict[str, Any]:
    use = found.usage
    return {
        "planner": found.case.plan.planner,
        "step_s": found.step_s,
        "samples": found.case.samples,
        "samples_per_s": found.samples_per_s,
        "bubble_share": use.bubble_share,
        "num_steps": found.num_steps,
        "critical_path_s": {kind.value: seconds for kind, seconds in found.path.kind_s.items()},
        "devices": [asdict(device) for device in use.devices],
        "channels": [asdict(channel) for channel in use.channels],
        "transfers": {kind.value: _transfers(use, kind) for kind in TRANSFERS},
    }


def _transfers(use: Usage, kind: TaskKind) -> dict[str, float]:
    found = [one for one in use.transfers if one.kind is kind]
    return {
        "count": len(found),
        "total_s": sum(one.duration_s for one in found),
        "exposed_s": sum(one.exposed_s for one in found),
    }


def _speedups(found: Speedups) -> dict[str, Any]:
    return {
        "one_device_samples_per_s": found.base_samples_per_s,
        "samples_per_s": found.samples_per_s,
        "speedup": found.speedups(),
        "notes": found.notes,
    }
