"""What callbacks and loggers read is the same on all ranks, and as on one device."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from helpers import modules
from helpers.models import DataSpec, ExportableModel
from helpers.reference import assert_equal_training, train_one_device, train_pipeline
from helpers.training import Training
from helpers.workers import WorkerPool

DATA = DataSpec(num_inputs=2)


@pytest.mark.parametrize(("num_ranks", "schedule"), [(1, "gpipe"), (3, "gpipe"), (3, "1f1b")])
def test_every_way_of_logging(pool: WorkerPool, num_ranks: int, schedule: str) -> None:
    """Steps, epochs, mean, max, min and sum over micro-batches, and logging from hooks."""
    training = Training(modules.MetricsModel, DATA)
    results = assert_equal_training(
        pool, training, num_ranks=num_ranks, num_microbatches=4, schedule=schedule
    )
    names = {"train_loss_step", "train_loss_epoch", "train_count", "val_count", "epoch_number"}
    for result in results:
        assert names <= set(result.final_metrics)


def test_decisions_by_logged_values(pool: WorkerPool, tmp_path: Path) -> None:
    """ModelCheckpoint and EarlyStopping decide alike on all ranks."""
    trainer = {"max_epochs": 9, "enable_checkpointing": True}
    training = Training(ExportableModel, DATA, num_steps=-1, trainer=trainer)
    here, there = (
        Training(
            training.build,
            DATA,
            num_steps=-1,
            trainer=trainer,
            callbacks=partial(modules.decision_callbacks, str(tmp_path / name)),
        )
        for name in ("one", "many")
    )
    expected = train_one_device(here)
    assert 0 < expected.extra["stopped_epoch"] < 8, "the test needs a run that stops early"
    results = train_pipeline(pool, there, num_ranks=3, num_microbatches=2)
    for result in results:
        score = result.extra.pop("best_score")
        assert score == pytest.approx(expected.extra["best_score"], rel=1e-9)
        assert result.extra == {k: v for k, v in expected.extra.items() if k != "best_score"}
    assert [path.name for path in (tmp_path / "many").iterdir()] == [expected.extra["best"]]


def test_a_plateau_scheduler_follows_the_validation_loss(pool: WorkerPool) -> None:
    build = partial(ExportableModel, optimizer_name="sgd", scheduler="plateau")
    training = Training(build, DATA, trainer={"max_epochs": 8}, num_steps=-1)
    results = assert_equal_training(pool, training, num_ranks=3, num_microbatches=4)
    rates = {rates[0] for rates in results[1].learning_rates}
    assert len(rates) > 1, "the test needs a run whose learning rate falls"
