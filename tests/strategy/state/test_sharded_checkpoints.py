"""Checkpoints in a folder, of which every rank writes and reads its part."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from helpers.models import DataSpec, ExportableModel
from helpers.modules import epoch_checkpoints
from helpers.reference import (
    assert_same_training,
    train_one_device,
    train_pipeline,
    weight_differences,
)
from helpers.saving import end_while_saving
from helpers.training import Result, Training
from helpers.workers import WorkerPool
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from lightning_gpp.strategy import (
    GraphPipeStrategy,
    unshard_checkpoint,
)
from lightning_gpp.strategy.settings import SHARDED, refuse_callbacks
from lightning_gpp.strategy.state import sharded_checkpoint
from lightning_gpp.strategy.state.sharded_checkpoint import (
    ReplacingCheckpointIO,
    is_sharded,
    last_good,
    write,
)

BUILD = partial(ExportableModel, hidden=5, optimizer_name="adamw", scheduler="step")
TRAINING = Training(BUILD, DataSpec(num_inputs=2), num_steps=12)
CHECKPOINT = "epoch=1.ckpt"


def run(pool: WorkerPool, num_ranks: int, form: str, folder: Path, **changes: Any) -> list[Result]:
    """Trains with a checkpoint of every epoch of four steps."""
    training = replace(
        TRAINING,
        trainer={"enable_checkpointing": True} | changes.pop("trainer", {}),
        callbacks=partial(epoch_checkpoints, str(folder)),
        **changes,
    )
    if num_ranks == 1:
        return [train_one_device(training)]
    options = {"num_microbatches": 2, "state_dict_type": form}
    return train_pipeline(pool, training, num_ranks=num_ranks, **options)


@pytest.fixture(scope="module")
def both(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Result]:
    """The same training of three stages with files and with folders, and its results."""
    folder = tmp_path_factory.mktemp("both")
    expected = run(pool, 3, "full", folder / "full")[0]
    run(pool, 3, "sharded", folder / "sharded")
    return folder / "full" / CHECKPOINT, folder / "sharded" / CHECKPOINT, expected


def test_every_rank_has_written_its_part(both: tuple[Path, Path, Result]) -> None:
    _, folder, _ = both
    assert is_sharded(folder)
    assert len(list(folder.glob("*.distcp"))) == 3
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]


def test_an_ordinary_file_is_made_of_a_folder(
    both: tuple[Path, Path, Result], tmp_path: Path
) -> None:
    file, folder, _ = both
    unshard_checkpoint(folder, tmp_path / "made.ckpt")
    made, expected = (
        torch.load(each, weights_only=True) for each in (tmp_path / "made.ckpt", file)
    )
    assert_same(made, expected)
    tool = _load_distributed_checkpoint(folder)  # what Lightning's command line does
    assert_same(tool["model"], expected["state_dict"])


@pytest.mark.parametrize(("num_ranks", "form"), [(2, "sharded"), (3, "full")])
def test_resuming_from_a_folder(
    pool: WorkerPool, both: tuple[Path, Path, Result], tmp_path: Path, num_ranks: int, form: str
) -> None:
    _, folder, expected = both
    results = run(pool, num_ranks, form, tmp_path, checkpoint=str(folder))
    rest = replace(
        expected,
        losses=expected.losses[8:],
        learning_rates=expected.learning_rates[8:],
        # The first lacks train_loss_epoch, on one device too: no epoch has ended in this run.
        validations=expected.validations[3:],
        logged=results[0].logged,
    )
    for result in results:
        del result.validations[: len(result.validations) - len(rest.validations)]
    assert_same_training(results, rest, "float64")


def test_states_that_no_batch_came_for_are_not_lost(
    pool: WorkerPool, both: tuple[Path, Path, Result], tmp_path: Path
) -> None:
    """A fit that is over when it is resumed saves what it has read."""
    file, folder, _ = both
    path = tmp_path / "again.ckpt"
    over = {"num_steps": 8, "checkpoint": str(folder), "save_as": str(path)}
    run(pool, 2, "full", tmp_path, **over)
    again, expected = torch.load(path, weights_only=True), torch.load(file, weights_only=True)
    for name in ("state_dict", "optimizer_states"):
        assert_same(again[name], expected[name])


def test_two_pipelines_save_a_folder(pool: WorkerPool, tmp_path: Path) -> None:
    """One of them writes it; one pipeline of three stages, and one device, go on from it."""
    folder, file = tmp_path / CHECKPOINT, tmp_path / "file"
    training = replace(TRAINING, trainer={"use_distributed_sampler": False}, validate=False)
    options = {"num_microbatches": 2, "state_dict_type": "sharded"}
    saving = replace(
        training,
        num_steps=8,
        trainer={**training.trainer, "enable_checkpointing": True},
        callbacks=partial(epoch_checkpoints, str(tmp_path)),
    )
    train_pipeline(pool, saving, num_ranks=4, pipelines=2, **options)
    assert len(list(folder.glob("*.distcp"))) == 2
    unshard_checkpoint(folder, file)
    expected = train_one_device(replace(training, checkpoint=str(file)))
    rest = replace(training, checkpoint=str(folder))
    for ranks, pipelines in ((3, 1), (4, 2)):
        results = train_pipeline(pool, rest, num_ranks=ranks, pipelines=pipelines, **options)
        assert not weight_differences(results[0].weights, expected.weights, 1e-9)


def test_a_job_that_ends_while_it_saves_leaves_the_last_one(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = tmp_path / "last"
    outcomes = pool.outcomes(end_while_saving, str(path), 2, num_ranks=2)
    report = "\n".join(outcome.describe() for outcome in outcomes)
    assert outcomes[1].exit_code not in (None, 0), report
    assert outcomes[0].failed and not outcomes[0].hung, report
    assert [entry.name for entry in tmp_path.iterdir()] != ["last"]  # what was being written
    assert GraphPipeStrategy().load_checkpoint(path)["global_step"] == 4
    run(pool, 2, "sharded", tmp_path, checkpoint=str(path), save_as=str(path))
    assert GraphPipeStrategy().load_checkpoint(path)["global_step"] == 12


@pytest.mark.parametrize("step", ["replace", "rename"])
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_the_path_always_leads_to_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, step: str
) -> None:
    """An end before and between the renamings, as a kill leaves it: nothing cleans up after."""
    path = tmp_path / "last.ckpt"

    def save(number: int) -> None:
        checkpoint = {"state_dict": {"weight": torch.full((2,), float(number))}, "epoch": number}
        if form == "full":
            ReplacingCheckpointIO().save_checkpoint(checkpoint, path)
        else:
            write(checkpoint, path, None)

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    save(1)
    with monkeypatch.context() as patch:
        if step == "replace":
            patch.setattr(sharded_checkpoint.os, "replace", end)
        else:
            patch.setattr(sharded_checkpoint, "put_in_place", end)
        with pytest.raises((KeyboardInterrupt, CheckpointException)):
            save(2)
    assert GraphPipeStrategy().load_checkpoint(path)["epoch"] == 1
    save(3)
    loaded = GraphPipeStrategy().load_checkpoint(path)
    assert loaded["epoch"] == 3
    assert loaded["state_dict"]["weight"].tolist() == [3.0, 3.0]
    assert last_good(path) == path
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_callbacks_with_weights_of_their_own_are_refused() -> None:
    trainer = lp.Trainer(callbacks=[WeightAveraging()], logger=False, accelerator="cpu")
    with pytest.raises(NotImplementedError, match="WeightAveraging keeps other weights"):
        refuse_callbacks(trainer, SHARDED)


def assert_same(actual: Any, expected: Any, where: str = "checkpoint") -> None:
    """Equal values, tensors to the bit."""
    if isinstance(expected, Tensor):
        assert torch.equal(actual.cpu(), expected.cpu()), where
    elif isinstance(expected, dict):
        assert set(actual) == set(expected), where
        for key, value in expected.items():
            if key != "callbacks":  # with the paths of the run
                assert_same(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(actual[index], value, f"{where}[{index}]")
    else:
        assert actual == expected, where
