"""The accelerator ``emulated``: real training at the pace of described devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from helpers.models import DataSpec, ExportableModel
from helpers.reference import assert_same_training, train_one_device
from helpers.training import Result, Training, quiet, train
from helpers.workers import WorkerPool

from lightning_gpp import EmulatedAccelerator, GraphPipeStrategy, TimelineCallback
from lightning_gpp.cluster import Cluster, Device, DeviceKind, Link
from lightning_gpp.emulation.report import emulation_report
from lightning_gpp.emulation.shared import EmulatedStep
from lightning_gpp.simulate import Timeline

TOWERS, TOP = ["left", "right"], ["fuse", "norm", "head"]
PLAN = [TOWERS, TOP]
REPLICAS = [{"modules": TOWERS, "devices": [0, 1]}, {"modules": TOP, "devices": [2]}]
TRAINING = Training(ExportableModel, DataSpec(num_inputs=2), num_steps=5)

SLOW = DeviceKind("abacus", {"float64": 2e5, "float32": 2e5}, 1e12, source="made up")
"""A forward of the model takes milliseconds on it, in emulated time."""


def abaci(count: int) -> Cluster:
    devices = tuple(Device(f"abacus:{index}", SLOW.name) for index in range(count))
    return Cluster(devices, Link(1e6, 1e-3), device_kinds=(SLOW,))


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accelerator", "devices", "strategy", "error", "text"),
    [
        ("emulated", 2, {}, ValueError, "needs the cluster to emulate"),
        ("emulated", "cpu,cpu", {"cluster": "summit"}, TypeError, "takes a number of devices"),
        ("emulated", -1, {"cluster": "summit"}, ValueError, "got devices=-1"),
        ("emulated", "auto", {"cluster": "summit"}, ValueError, "got none"),
        ("emulated", 3, {"cluster": abaci(2)}, ValueError, "has 2 devices, but there are 3 ranks"),
        (EmulatedAccelerator("summit"), 2, {"cluster": "summit"}, ValueError, "given twice"),
        (
            EmulatedAccelerator("summit"),
            2,
            {"schedule": "1f1b-async"},
            NotImplementedError,
            "drain",
        ),
    ],
)
def test_trainers_that_cannot_be(
    accelerator: Any, devices: Any, strategy: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        lp.Trainer(accelerator=accelerator, devices=devices, strategy=GraphPipeStrategy(**strategy))


def test_options_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="neither a preset"):
        EmulatedAccelerator("sumit")
    with pytest.raises(ValueError, match="time_scale must be above 0, got 0"):
        EmulatedAccelerator(time_scale=0)


def test_other_strategies_are_refused() -> None:
    trainer = lp.Trainer(
        accelerator="emulated", devices=1, max_epochs=1, logger=False, enable_checkpointing=False
    )
    with quiet(), pytest.raises(TypeError, match=r'"emulated" works with the graphpipe strategies'):
        trainer.fit(ExportableModel(), DataSpec(num_inputs=2).loader())


# Training ----------------------------------------------------------------------------------------


def emulated(training: Training, num_devices: int, **options: Any) -> Training:
    accelerator = EmulatedAccelerator(abaci(num_devices), **options)
    trainer = {**training.trainer, "accelerator": accelerator, "devices": num_devices}
    return dataclasses.replace(training, trainer=trainer)


def train_and_report(
    training: Training, strategy: dict[str, Any], num_ranks: int
) -> tuple[Result, dict[int, Timeline]]:
    """Trains with a timeline of the third step; of rank 0 the report is in the metrics."""
    recorder = TimelineCallback(steps=2, dirpath=".", picture=False)
    with_timeline = dataclasses.replace(training, callbacks=lambda: [recorder])
    return train(with_timeline, {"timeout": 100, **strategy}, num_ranks), recorder.timelines


REPORTED = ("emulated_step_s", "emulated_slip_s", "predicted_step_s")


@pytest.mark.parametrize(
    ("plan", "num_ranks", "schedule"),
    [(PLAN, 2, "gpipe"), (PLAN, 2, "1f1b"), (REPLICAS, 3, "gpipe")],
)
def test_training_equals_one_device(
    plan: Any, num_ranks: int, schedule: str, pool: WorkerPool
) -> None:
    """Bit for bit what the same pipeline learns on real devices."""
    strategy = {"plan": plan, "num_microbatches": 2, "schedule": schedule}
    ranks = pool.run(
        train_and_report, emulated(TRAINING, num_ranks), strategy, num_ranks, num_ranks=num_ranks
    )
    results = [result for result, _ in ranks]
    numbers = {name: results[0].final_metrics.pop(name) for name in REPORTED}
    (recorded,) = (row for row in results[0].logged if "timeline/step_s" in row)
    sources = {name.split("/")[1] for name in recorded if name.startswith("prediction/")}
    assert sources == {"measured", "estimate"}, "a refit of an emulated step is not a prediction"
    results[0].logged.remove(recorded)
    assert_same_training(results, train_one_device(TRAINING), "float64")
    real = pool.run(train, TRAINING, {"timeout": 100, **strategy}, num_ranks, num_ranks=num_ranks)
    for name, value in real[0].weights.items():
        assert torch.equal(results[0].weights[name], value), name
    check_pace(numbers, ranks[0][1][2])


def check_pace(numbers: dict[str, float], timeline: Timeline) -> None:
    """A step takes what was predicted and what slipped on some rank; the timeline shows it."""
    predicted_s, slip_s = numbers["predicted_step_s"], numbers["emulated_slip_s"]
    assert 5e-3 < predicted_s < 1
    assert predicted_s * (1 - 1e-6) <= numbers["emulated_step_s"]
    most_s = predicted_s * (1 + 1e-6) + timeline.num_ranks * slip_s
    assert numbers["emulated_step_s"] <= most_s
    assert timeline.source == "emulated" and timeline.step_s > 0.5 * predicted_s


# The report --------------------------------------------------------------------------------------


def test_the_report_leaves_the_first_step_out_and_takes_the_median() -> None:
    steps = {
        0: [(0.0, 9.0, 4), (10.0, 12.0, 4), (20.0, 21.0, 2), (30.0, 31.0, 4), (40.0, 43.5, 4)],
        1: [(0.0, 8.0, 4), (10.0, 11.0, 4), (20.0, 21.0, 2), (30.0, 32.5, 4), (40.0, 41.0, 4)],
    }
    ranks = [
        [
            EmulatedStep(start_s, end_s, count, 0.5 if (rank, start_s) == (1, 30.0) else 0.0)
            for start_s, end_s, count in rows
        ]
        for rank, rows in steps.items()
    ]
    report = emulation_report(
        ranks, num_microbatches=4, predicted_s=2.0, time_scale=1190.4, kinds=["abacus"]
    )
    assert report is not None
    assert report.step_s == (2.0, 2.5, 3.5) and report.typical_s == 2.5
    assert report.slip_s == 0.5 and report.error == pytest.approx(0.25)
    assert max(map(len, report.text().split("\n"))) <= 100
    close = dataclasses.replace(report, predicted_s=2.500_01)
    assert ", +0.0 % against" in " ".join(close.text().split())
    text = " ".join(report.text().split())
    assert (
        "2.50 s per step (median of 3 steps, 2.00 s to 3.50 s), +25.0 % against the 2.00 s" in text
    )
    assert "slip 20.0 % of the step" in text
    assert "An emulated second took 1190 real ones." in text
    assert (
        emulation_report(
            [rank[2:3] for rank in ranks],
            num_microbatches=4,
            predicted_s=2.0,
            time_scale=5.0,
            kinds=["abacus"],
        )
        is None
    )
