"""Checkpoints are plain Lightning checkpoints: any number of devices reads any other's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.models import DataSpec, ExportableModel
from helpers.modules import epoch_checkpoints
from helpers.random_programs import DrawsPrograms
from helpers.reference import (
    assert_same_training,
    train_one_device,
    train_pipeline,
    weight_differences,
)
from helpers.training import Result, Training
from helpers.workers import WorkerPool

BUILD = partial(ExportableModel, hidden=5, optimizer_name="adamw", scheduler="step")
SHARES = {2: [0.3, 0.7], 3: [0.2, 0.5, 0.3]}


def run(pool: WorkerPool, training: Training, num_ranks: int, folder: Path) -> list[Result]:
    """Trains on that many ranks (1: a plain Trainer), with a checkpoint of every epoch."""
    training = replace(
        training,
        trainer={"enable_checkpointing": True},
        callbacks=partial(epoch_checkpoints, str(folder)),
    )
    if num_ranks == 1:
        return [train_one_device(training)]
    return train_pipeline(
        pool,
        training,
        num_ranks=num_ranks,
        kind="HAPStrategy",
        planner=DrawsPrograms(num_ranks),
        shares=SHARES[num_ranks],
    )


@pytest.mark.parametrize(("before", "after"), [(3, 2), (3, 1), (1, 3)])
def test_resuming_on_another_number_of_devices(
    pool: WorkerPool, tmp_path: Path, before: int, after: int
) -> None:
    """A run resumed after two of five epochs ends where the uninterrupted one does."""
    training = Training(BUILD, DataSpec(num_inputs=2))
    expected = run(pool, training, before, tmp_path / "whole")[0]
    resumed = replace(training, checkpoint=str(tmp_path / "whole" / "epoch=1.ckpt"))
    results = run(pool, resumed, after, tmp_path / "resumed")
    rest = replace(
        expected,
        losses=expected.losses[8:],
        learning_rates=expected.learning_rates[8:],
        # The first lacks train_loss_epoch, on one device too: no epoch has ended in this run.
        validations=expected.validations[3:],
        logged=results[0].logged,
    )
    assert len(results[0].losses) == 12
    for result in results:
        del result.validations[0]
    assert_same_training(results, rest, "float64")


def test_a_checkpoint_of_three_devices_is_that_of_one(pool: WorkerPool, tmp_path: Path) -> None:
    training = Training(BUILD, DataSpec(num_inputs=2), num_steps=8)
    run(pool, training, 3, tmp_path / "three")
    run(pool, training, 1, tmp_path / "one")
    three, one = (
        torch.load(tmp_path / name / "epoch=1.ckpt", weights_only=True) for name in ("three", "one")
    )
    for key in ("epoch", "global_step", "hyper_parameters", "lr_schedulers", "loops"):
        assert three[key] == one[key], key
    assert not weight_differences(three["state_dict"], one["state_dict"], 1e-9)
    states = [checkpoint["optimizer_states"][0] for checkpoint in (three, one)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    flat = [
        {
            f"{i} {key}": torch.as_tensor(v)
            for i, s in state["state"].items()
            for key, v in s.items()
        }
        for state in states
    ]
    assert not weight_differences(*flat, 1e-9)
