"""A simulation as a file of plain numbers: seconds, bytes, samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_gpp.jobs.simulated import Simulated
from lightning_gpp.jobs.speedup import Speedups
from lightning_gpp.simulate.levers import Lever

FILE = "simulation.json"


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
    (folder / FILE).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _step(found: Simulated) -> dict[str, Any]:
    use = found.use
    return {
        "planner": found.case.plan.planner,
        "step_s": found.step_s,
        "samples": found.case.samples,
        "samples_per_s": found.samples_per_s,
        "bubble_fraction": use.bubble_fraction,
        "critical_path_s": use.path_s,
        "transfer_s": use.transfer_s,
        "devices": [
            {"device": device, "seconds": seconds, "peak_memory_bytes": use.peak_bytes[device]}
            for device, seconds in use.devices.items()
        ],
        "channels": [asdict(channel) for channel in use.channels],
    }


def _speedups(found: Speedups) -> dict[str, Any]:
    return {
        "one_device_samples_per_s": found.base_samples_per_s,
        "samples_per_s": found.samples_per_s,
        "speedup": found.speedups(),
        "notes": found.notes,
    }
