"""Callbacks that cannot work on a part of the model are refused with the remedy."""

from __future__ import annotations

import pytest
from helpers.training import make_trainer
from lightning.pytorch import callbacks as pc

from lightning_gpp.strategy.refusals import refuse_callbacks


@pytest.mark.parametrize(
    ("callback", "remedy"),
    [
        (pc.ModelPruning("l1_unstructured", amount=0.3), "prune the trained module"),
        (pc.BatchSizeFinder(), "choose the batch size by hand"),
        (pc.StochasticWeightAveraging(0.1), "several checkpoints"),
        (pc.WeightAveraging(), "several checkpoints"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, pc.Callback) else "",
)
def test_refused(callback: pc.Callback, remedy: str) -> None:
    trainer = make_trainer(None, callbacks=[pc.Timer(), callback])
    with pytest.raises(NotImplementedError, match=f"{type(callback).__name__}.*{remedy}"):
        refuse_callbacks(trainer)


def test_others_are_taken() -> None:
    refuse_callbacks(make_trainer(None, callbacks=[pc.Timer(), pc.BackboneFinetuning()]))
