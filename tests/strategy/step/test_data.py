"""Batches reach the stages whole and in pairs, however the data are made."""

from __future__ import annotations

import pytest
from helpers import modules
from helpers.jobs import fit_mixed
from helpers.workers import WorkerPool
from torch.utils.data import DataLoader


@pytest.mark.parametrize(("where", "num_steps"), [("getitem", 12), ("collate", 12), ("worker", 4)])
def test_random_mixing_keeps_inputs_and_labels_together(
    pool: WorkerPool, where: str, num_steps: int
) -> None:
    """Every rank's random numbers differ, so two draws of a sample never agree."""
    losses = pool.run(fit_mixed, where, num_steps, num_ranks=3)
    assert len(losses[0]) == num_steps
    assert losses[1] == losses[0]
    assert losses[2] == losses[0]


def test_the_pair_check_notices_wrong_pairs() -> None:
    """Guards the check itself: labels of another draw must not pass."""
    model = modules.EchoModel().double()
    (inputs, _), (_, target) = (next(iter(DataLoader(modules.MixingData(), 4))) for _ in "ab")
    with pytest.raises(AssertionError, match="not close"):
        model.step_loss((inputs, target))
    model.step_loss((inputs, modules.targets_of(tuple(inputs))))
