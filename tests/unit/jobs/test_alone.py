"""What batches take beside operators is measured by training in one process."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.planning_jobs import LAYER_S, STEP_S, Sleeping, SleepingData
from omegaconf import OmegaConf

from lightning_gpp.cluster import cluster_preset
from lightning_gpp.jobs.problem import recipe_problem
from lightning_gpp.jobs.problem.recipe_problem import batches_alone
from lightning_gpp.strategy.recording.batch_clock import ENOUGH_S

HERE = "helpers.planning_jobs."
CONFIG: dict[str, Any] = {
    "seed": 0,
    "strategy": "graphpipe",
    "recipe": {"module": {"_target_": f"{HERE}{Sleeping.__name__}"}, "takes_data": False},
    "data": {"_target_": f"{HERE}{SleepingData.__name__}"},
    "trainer": {"_target_": "lightning.pytorch.Trainer", "accelerator": "cpu", "max_epochs": 0},
}


def test_the_step_is_told_from_the_forward_in_it() -> None:
    times = batches_alone(OmegaConf.create(CONFIG), cluster_preset("cpu", 2), LAYER_S)
    assert times is not None and times.own_s is not None
    assert times.num_batches * times.batch_s >= ENOUGH_S  # more than an epoch
    assert times.own_s >= STEP_S
    assert times.batch_s - times.own_s >= LAYER_S


@pytest.mark.parametrize("options", [{}, {"fast_dev_run": 2}])
def test_nothing_is_said_of_long_batches_and_of_too_few(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = OmegaConf.create(CONFIG | {"trainer": CONFIG["trainer"] | options})
    if not options:
        monkeypatch.setattr(recipe_problem, "on_one_device", None)  # it is not even begun
    one_device_s = LAYER_S if options else ENOUGH_S
    assert batches_alone(config, cluster_preset("cpu", 2), one_device_s) is None
