"""SPMD programs at the pace of described devices: what they learn, and how long it takes."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as lp
import pytest
from helpers.models import FIXED_MODELS, DataSpec, ExportableModel
from helpers.random_models import BranchyModel, OptimizerSpec
from helpers.random_programs import DrawsPrograms
from helpers.reference import assert_same_training, train_one_device
from helpers.training import Training, train
from helpers.workers import WorkerPool

from lightning_gpp import EmulatedAccelerator
from lightning_gpp.cluster import Cluster, Device, DeviceKind, Link
from lightning_gpp.strategy import HAPStrategy

pytestmark = pytest.mark.timeout(400)

SLOW = DeviceKind("abacus", {"float64": 4e4, "float32": 4e4}, 1e12, source="made up")
SLOWER = DeviceKind("fingers", {"float64": 2e4, "float32": 2e4}, 1e12, source="made up")
"""A layer takes milliseconds on them, in emulated time."""

REPORTED = ("emulated_step_s", "emulated_slip_s", "predicted_step_s")


def cluster(num_devices: int) -> Cluster:
    kinds = [SLOW, *[SLOWER] * (num_devices - 1)]
    devices = tuple(Device(f"{kind.name}:{i}", kind.name) for i, kind in enumerate(kinds))
    return Cluster(devices, Link(1e7, 1e-3), device_kinds=(SLOW, SLOWER))


def towers(num_devices: int, accelerator: Any) -> Training:
    spec = FIXED_MODELS["two_towers"]
    return Training(
        partial(BranchyModel, spec, OptimizerSpec()),
        DataSpec(num_inputs=spec.num_inputs, num_samples=32),
        num_steps=5,
        trainer={"accelerator": accelerator, "devices": num_devices},
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("num_devices", "strategy"),
    [
        (2, {}),
        (2, {"planner": "data_parallel", "shares": [0.7, 0.3]}),
        (3, {"planner": DrawsPrograms(3)}),
        (1, {}),
    ],
    ids=["hap", "samples", "drawn", "one"],
)
def test_pace_and_weights(pool: WorkerPool, num_devices: int, strategy: dict[str, Any]) -> None:
    """What one device learns, in the time that is predicted."""
    training = towers(num_devices, EmulatedAccelerator(cluster(num_devices)))
    options = {"kind": "HAPStrategy", "timeout": 100, **strategy}
    limit_s = 200.0  # a busy machine makes emulated time pass more slowly
    results = pool.run(
        train, training, options, num_devices, num_ranks=num_devices, limit_s=limit_s
    )
    numbers = {name: results[0].final_metrics.pop(name) for name in REPORTED}
    assert_same_training(results, train_one_device(towers(1, "cpu")), "float64")
    predicted_s, step_s = numbers["predicted_step_s"], numbers["emulated_step_s"]
    assert 5e-4 < predicted_s < 10
    most_s = predicted_s * 1.05 + num_devices * numbers["emulated_slip_s"]
    assert predicted_s * 0.95 <= step_s <= most_s


def test_a_given_scale_begins_at_once(pool: WorkerPool) -> None:
    training = towers(2, EmulatedAccelerator(cluster(2), time_scale=0.5))
    options = {"kind": "HAPStrategy", "timeout": 100}
    results = pool.run(train, training, options, 2, num_ranks=2)
    assert results[0].final_metrics["emulated_step_s"] > 0


def test_shapes_alone_are_for_pipelines() -> None:
    accelerator = EmulatedAccelerator("summit", tensors="shape_only")
    with pytest.raises(NotImplementedError, match='train on emulated devices with tensors="real"'):
        lp.Trainer(accelerator=accelerator, devices=2, strategy=HAPStrategy()).fit(
            ExportableModel(), DataSpec().loader()
        )
