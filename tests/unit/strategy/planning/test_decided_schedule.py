"""Which schedule a run has: as asked for, or as memory allows; no rank is started."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gpp.capture import CapturedModel, capture
from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.cost import ANY_DEVICE, Costs, OpProfile, Profile
from lightning_gpp.planner import evaluate_plan
from lightning_gpp.planner.base import HOLD_FEWER
from lightning_gpp.strategy import GraphPipeStrategy
from lightning_gpp.strategy.planning.planning import Example, Planned, plan_pipeline
from lightning_gpp.strategy.report import describe_planned

CPU = torch.device("cpu")
LAYERS = [["0", "1"], ["2", "3"]]
MINIBATCH = 8
FULL = GraphPipeStrategy(report="full").settings


def captured() -> CapturedModel:
    """Four layers with 80 bytes of parameters each, of which Adam makes 320."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    return capture(model, (torch.randn(1, 4),), {})


def planned(memory_bytes: int, **options: Any) -> Planned:
    """The plan for two devices, where a layer keeps 100 bytes of a sample.

    Two layers hold 640 bytes, 1,600 for all samples, and 400 for the two in flight with ``1f1b``;
    the user's step holds the batch (128 bytes), and outputs and gradients of all samples (256).
    """
    model = captured()
    profile = Profile(
        {operator.name: OpProfile(1.0, 2.0, 100) for operator in model.graph}, 1, ANY_DEVICE
    )
    devices = tuple(Device(str(index), "cpu", memory_bytes=memory_bytes) for index in range(2))
    cluster = Cluster(devices, Link(1e15))
    strategy = GraphPipeStrategy(
        **{"cache": False, "costs": Costs((profile,)), "num_microbatches": MINIBATCH} | options
    )
    example = Example((torch.randn(1, 4),), {}, MINIBATCH, MINIBATCH)
    return plan_pipeline(strategy.settings, model, example, cluster, None, CPU)


@pytest.mark.parametrize("options", [{}, {"plan": LAYERS}], ids=["planner", "by hand"])
class TestSchedule:
    def test_gpipe_where_it_fits(self, options: dict[str, Any]) -> None:
        found = planned(2_624, **options)
        assert found.request.schedule == "gpipe"
        assert not any("Schedule" in note for note in found.notes)

    @pytest.mark.parametrize("memory_bytes", [1_040, 2_623])
    def test_1f1b_where_nothing_else_fits_and_the_report_says_so(
        self, options: dict[str, Any], memory_bytes: int
    ) -> None:
        found = planned(memory_bytes, **options)
        assert found.request.schedule == "1f1b"
        (note,) = (note for note in found.notes if note.startswith("Schedule: 1f1b, as "))
        assert note.endswith("the loss must be a mean over samples.")
        needed = re.search(r"gpipe needs (\d\.\d) kB of \d\.\d kB on device", note)
        assert needed is not None and 1000 * float(needed[1]) > memory_bytes - 50  # is rounded
        assert note in describe_planned(found, FULL)

    @pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
    def test_who_names_one_gets_it(self, options: dict[str, Any], schedule: str) -> None:
        assert planned(2_624, schedule=schedule, **options).request.schedule == schedule


@pytest.mark.parametrize(
    ("weights", "schedule", "in_flight"),
    [("flush", "1f1b", [1, 1]), ("stash", "1f1b-async", [2, 1])],
)
def test_a_pipeline_that_drains_after_every_batch_is_planned_as_one(
    weights: str, schedule: str, in_flight: list[int]
) -> None:
    options = {"schedule": "1f1b-async", "weights": weights, "num_microbatches": None}
    found = planned(10_000, plan=LAYERS, **options)
    assert found.request.schedule == schedule
    stages = evaluate_plan(found.plan, found.request).stages
    assert [stage.in_flight for stage in stages] == in_flight


def test_a_pipeline_that_drains_is_one_of_all_devices() -> None:
    """It is for comparison: on one device alone it would be as quick."""
    options = {"schedule": "1f1b-async", "weights": "flush", "num_microbatches": None}
    found = planned(10_000, **options)
    assert [stage.devices for stage in found.plan.stages] == [(1,), (0,)]  # by rank


def test_a_planner_that_is_to_hold_all_names_the_remedy() -> None:
    with pytest.raises(ValueError, match="no division of the model") as error:
        planned(1_040, schedule="gpipe")
    assert HOLD_FEWER in str(error.value)


def test_a_plan_by_hand_that_never_fits_is_run_with_gpipe_and_said_not_to_fit() -> None:
    found = planned(1_039, plan=LAYERS)
    assert found.request.schedule == "gpipe"
    assert "the plan does not fit" in describe_planned(found, FULL)


def test_schedules_are_known_names() -> None:
    assert GraphPipeStrategy().settings.schedule is None
    with pytest.raises(ValueError, match=r"(?s)2f2b.*gpipe.*1f1b"):
        GraphPipeStrategy(schedule="2f2b")
