"""How often a forward runs until it is known whether batches can be cut."""

from __future__ import annotations

import pytest
import torch
from helpers.models import DataSpec
from helpers.modules import ChainModel, ComparingModel, DroppingModel
from helpers.training import Training, make_trainer, quiet
from helpers.workers import WorkerPool
from torch import Tensor

from lightning_gpp.strategy.step import cut_checks

DATA = DataSpec(dtype="float64")


class NoisyModel(ChainModel):
    """Draws random numbers in both modes."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output + torch.rand_like(output)


TRAINING, EVALUATION = True, False


class SortingModel(ChainModel):
    """Compares every sample with others in a way that only trying tells."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output - output.sort(0).values


class DroppingSortingModel(DroppingModel):
    """It also compares every sample with others, in both modes."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output - output.sort(0).values


ALL, CUT = 3, 0
"""Passes in one piece, before the one that is cut."""


@pytest.mark.parametrize(
    ("build", "expected", "is_cut"),
    [
        # in one piece, beside other samples, and cut: the same
        (ChainModel, [(TRAINING, ALL)], True),
        # not the same, and twice the same in one piece
        (SortingModel, [(TRAINING, ALL)], False),
        # what it calls tells
        (ComparingModel, [], False),
        # it drew random numbers at capture: training mode tells whether a part fails, no more
        (DroppingModel, [(TRAINING, CUT), (EVALUATION, ALL)], True),
        (DroppingSortingModel, [(TRAINING, CUT), (EVALUATION, ALL)], False),
        # not even twice the same in one piece: nothing speaks against cutting it
        (NoisyModel, [(TRAINING, CUT), (EVALUATION, ALL)], True),
    ],
)
def test_passes_of_trials(
    pool: WorkerPool,
    build: type,
    expected: list[tuple[bool, int]],
    is_cut: bool,
) -> None:
    ((found, lines),) = pool.run(trials_of, Training(build, DATA, validate=False), num_ranks=1)
    assert found == expected
    assert any("in one piece" in line for line in lines) == (not is_cut)


def trials_of(training: Training) -> tuple[list[tuple[bool, int]], list[str]]:
    """Mode and passes of the trials of a training, and what is shown of them."""
    found: list[tuple[bool, int]] = []
    lines: list[str] = []
    take_part = cut_checks.take_part

    def watched(run, trial, boundaries):
        found.append((trial.training, trial.num_whole))
        return take_part(run, trial, boundaries)

    with quiet(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut_checks, "take_part", watched)
        patch.setattr(cut_checks, "show", lines.append)
        trainer = make_trainer({"num_microbatches": 2}, max_steps=1)
        trainer.fit(training.module(), training.data.loader())
    return found, lines
