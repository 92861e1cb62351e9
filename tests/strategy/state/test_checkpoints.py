"""Checkpoints are plain Lightning checkpoints: any number of devices reads any other's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.jobs import save_after_fit
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
TOLERANCE = 1e-9


SHARES = {2: [0.3, 0.7], 3: [0.2, 0.5, 0.3]}


def strategy_of(kind: str, num_ranks: int) -> dict[str, Any]:
    """Arguments of the strategy."""
    if kind == "graphpipe":
        return {"num_microbatches": 2}
    planner, shares = DrawsPrograms(num_ranks), SHARES[num_ranks]
    return {"kind": "HAPStrategy", "planner": planner, "shares": shares}


def run(
    pool: WorkerPool, training: Training, num_ranks: int, folder: Path, kind: str = "graphpipe"
) -> list[Result]:
    """Trains on that many ranks (1: a plain Trainer), with a checkpoint of every epoch."""
    training = replace(
        training,
        trainer={"enable_checkpointing": True},
        callbacks=partial(epoch_checkpoints, str(folder)),
    )
    if num_ranks == 1:
        return [train_one_device(training)]
    return train_pipeline(pool, training, num_ranks=num_ranks, **strategy_of(kind, num_ranks))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["graphpipe", "hap"])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (3, 1), (1, 3)])
def test_resuming_on_another_number_of_devices(
    pool: WorkerPool, tmp_path: Path, kind: str, before: int, after: int
) -> None:
    """A run resumed after two of four epochs ends where the uninterrupted one does."""
    training = Training(BUILD, DataSpec(num_inputs=2), num_steps=16)
    expected = run(pool, training, before, tmp_path / "whole", kind)[0]
    resumed = replace(training, checkpoint=str(tmp_path / "whole" / "epoch=1.ckpt"))
    results = run(pool, resumed, after, tmp_path / "resumed", kind)
    rest = replace(
        expected,
        losses=expected.losses[8:],
        learning_rates=expected.learning_rates[8:],
        # The first lacks train_loss_epoch, on one device too: no epoch has ended in this run.
        validations=expected.validations[3:],
        logged=results[0].logged,  # a resumed run starts later
    )
    assert len(results[0].losses) == 8
    for result in results:
        del result.validations[0]
    assert_same_training(results, rest, "float64")


@pytest.mark.parametrize("kind", ["graphpipe", "hap"])
def test_a_checkpoint_of_three_devices_is_that_of_one(
    pool: WorkerPool, tmp_path: Path, kind: str
) -> None:
    training = Training(BUILD, DataSpec(num_inputs=2), num_steps=8)
    run(pool, training, 3, tmp_path / "three", kind)
    run(pool, training, 1, tmp_path / "one")
    three, one = (
        torch.load(tmp_path / name / "epoch=1.ckpt", weights_only=True) for name in ("three", "one")
    )
    assert set(three) >= set(one)
    for key in ("epoch", "global_step", "hyper_parameters", "lr_schedulers", "loops"):
        assert three[key] == one[key], key
    assert not weight_differences(three["state_dict"], one["state_dict"], TOLERANCE)
    assert not weight_differences(_tensors(three), _tensors(one), TOLERANCE)
    groups = (ckpt["optimizer_states"][0]["param_groups"] for ckpt in (three, one))
    assert next(groups) == next(groups)


def _tensors(checkpoint: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The optimizer's state by parameter index and name."""
    state = checkpoint["optimizer_states"][0]["state"]
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, entries in state.items()
        for name, value in entries.items()
    }


def test_load_from_checkpoint_on_one_device(pool: WorkerPool, tmp_path: Path) -> None:
    training = Training(BUILD, DataSpec(num_inputs=2), num_steps=8)
    result = run(pool, training, 3, tmp_path)[0]
    torch.set_default_dtype(torch.float64)
    module = ExportableModel.load_from_checkpoint(tmp_path / "epoch=1.ckpt", map_location="cpu")
    assert module.hparams["hidden"] == 5
    assert not weight_differences(dict(module.state_dict()), result.weights, TOLERANCE)


def test_saving_when_the_fit_is_over(pool: WorkerPool, tmp_path: Path) -> None:
    path, one = tmp_path / "after.ckpt", tmp_path / "one.ckpt"
    save_after_fit(str(one), None)
    strategy = {"num_microbatches": 2, "timeout": 100.0}
    weights = pool.run(save_after_fit, str(path), strategy, 3, num_ranks=3)[0]
    torch.set_default_dtype(torch.float64)
    module = ExportableModel.load_from_checkpoint(path, map_location="cpu")
    assert not weight_differences(dict(module.state_dict()), weights, TOLERANCE)
    assert not weight_differences(
        _tensors(torch.load(path, weights_only=True)),
        _tensors(torch.load(one, weights_only=True)),
        TOLERANCE,
    )
