"""Batches reach the stages whole and in pairs, however the data are made."""

from __future__ import annotations

from functools import partial

import pytest
from helpers import modules
from helpers.jobs import fit_mixed
from helpers.models import DataSpec, ExportableModel
from helpers.reference import assert_equal_training
from helpers.training import Training
from helpers.workers import WorkerPool
from torch.utils.data import DataLoader

MODEL = partial(ExportableModel, optimizer_name="sgd")


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "num_microbatches"),
    [
        (29, 8, 4),  # last batch of 5: micro-batches of 2, 1, 1, 1
        (28, 8, 4),  # last batch of 4: micro-batches of one sample
        (23, 7, 3),  # no batch is a multiple of the micro-batches
    ],
)
def test_odd_last_batches(
    pool: WorkerPool, num_samples: int, batch_size: int, num_microbatches: int
) -> None:
    data = DataSpec(num_samples=num_samples, batch_size=batch_size, num_inputs=2)
    assert_equal_training(
        pool, Training(MODEL, data), num_ranks=3, num_microbatches=num_microbatches
    )


def test_a_shuffled_loader_gives_the_same_order_as_on_one_device(pool: WorkerPool) -> None:
    training = Training(MODEL, modules.ShuffledData(num_inputs=2))
    assert_equal_training(pool, training, num_ranks=3, num_microbatches=4)


@pytest.mark.parametrize("where", ["getitem", "collate", "worker"])
def test_random_mixing_keeps_inputs_and_labels_together(pool: WorkerPool, where: str) -> None:
    """Every rank's random numbers differ, so two draws of a sample never agree."""
    losses = pool.run(fit_mixed, where, num_ranks=3)
    assert len(losses[0]) == 12
    assert losses[1] == losses[0]
    assert losses[2] == losses[0]


def test_the_pair_check_notices_wrong_pairs() -> None:
    """Guards the check itself: labels of another draw must not pass."""
    model = modules.EchoModel().double()
    (inputs, _), (_, target) = (next(iter(DataLoader(modules.MixingData(), 4))) for _ in "ab")
    with pytest.raises(AssertionError, match="not close"):
        model.step_loss((inputs, target))
    model.step_loss((inputs, modules.targets_of(tuple(inputs))))
