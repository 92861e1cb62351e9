"""Full-graph training at the pace of described devices: what it learns, and how long it takes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers.full_graph import FullGraphJob, NodeClassifier, fit
from helpers.workers import WorkerPool

from lightning_gpp import EmulatedAccelerator
from lightning_gpp.cluster import Cluster, Device, DeviceKind, Link

SLOW = DeviceKind("abacus", {"float64": 2e6, "float32": 2e6}, 1e8, source="made up")
"""A layer takes milliseconds on it, much longer than here."""

GRAPH = {"num_vertices": 200, "num_edges": 800}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "strategy",
    [
        {"chunks": 4, "ways": 1},
        {"chunks": 2, "ways": 2},
        {"mode": "exact", "ways": 2},
    ],
    ids=["pipeline", "hybrid", "graph parallel"],
)
def test_pace_and_weights(pool: WorkerPool, strategy: dict[str, Any]) -> None:
    """Bit for bit what devices without a pace learn, in the time that is predicted."""
    job = FullGraphJob(partial(NodeClassifier, "gcn2"), GRAPH, epochs=4)
    devices = tuple(Device(f"abacus:{index}", SLOW.name) for index in range(2))
    accelerator = EmulatedAccelerator(Cluster(devices, Link(1e7, 1e-3), device_kinds=(SLOW,)))
    options = {**strategy, "seed": 7}
    emulated = pool.run(fit, job, options, 2, accelerator, num_ranks=2)
    numbers = emulated[0]["metrics"]
    predicted_s, slip_s = numbers["predicted_step_s"], numbers["emulated_slip_s"]
    assert predicted_s * (1 - 1e-6) <= numbers["emulated_step_s"]
    assert numbers["emulated_step_s"] <= predicted_s * (1 + 1e-6) + 2 * slip_s
    plain = pool.run(fit, job, options, 2, num_ranks=2)
    found, expected = (
        {name: weight for rank in ranks for name, weight in rank["weights"].items()}
        for ranks in (emulated, plain)
    )
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=1e-12)
