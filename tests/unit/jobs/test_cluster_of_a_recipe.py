"""``job=plan`` of a recipe plans for the ranks that ``job=train`` starts."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_gpp.cluster.this_machine import num_cores
from lightning_gpp.jobs.problem.problem import cluster_of

CPUS = {"_target_": "lightning_gpp.cluster.cluster_preset", "name": "cpu", "num_devices": None}


@pytest.mark.parametrize(
    ("devices", "graph", "cluster", "expected"),
    [
        (3, None, {}, 3),
        (3, None, {"num_devices": 5}, 5),
        (3, None, {"name": "summit", "num_devices": 4}, 4),
        (3, "mmt", {}, None),
        ("auto", None, {}, None),
        (-1, None, {}, None),
    ],
)
def test_as_many_devices_as_training_has_ranks(
    devices: Any, graph: str | None, cluster: dict[str, Any], expected: int | None
) -> None:
    config = OmegaConf.create(
        {"trainer": {"devices": devices}, "graph": graph, "cluster": CPUS | cluster}
    )
    assert cluster_of(config).num_devices == (expected or num_cores())
