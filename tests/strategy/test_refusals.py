"""Callbacks that cannot work on a part of the model are refused with the remedy."""

from __future__ import annotations

import pytest
from helpers.training import make_trainer
from lightning.pytorch import callbacks as pc

from lightning_gpp.strategy.settings import DIVIDED, ON_STAGES, refuse_callbacks


@pytest.mark.parametrize(
    ("callback", "remedy"),
    [
        (pc.ModelPruning("l1_unstructured", amount=0.3), "prune the trained module"),
        (pc.BatchSizeFinder(), "choose the batch size by hand"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, pc.Callback) else "",
)
def test_refused(callback: pc.Callback, remedy: str) -> None:
    trainer = make_trainer(None, callbacks=[pc.Timer(), callback], enable_checkpointing=True)
    with pytest.raises(NotImplementedError, match=f"{type(callback).__name__}.*{remedy}"):
        refuse_callbacks(trainer, ON_STAGES)


def test_others_are_taken() -> None:
    taken = [
        *(pc.Timer(), pc.BackboneFinetuning(), pc.ModelCheckpoint()),
        *(pc.StochasticWeightAveraging(0.1), pc.WeightAveraging()),
    ]
    trainer = make_trainer(None, callbacks=taken, enable_checkpointing=True)
    refuse_callbacks(trainer, ON_STAGES)


def test_one_rank_holds_all_weights() -> None:
    taken = [pc.BatchSizeFinder()]
    trainer = make_trainer(None, callbacks=taken, enable_checkpointing=True)
    refuse_callbacks(trainer, DIVIDED)
    pruning = make_trainer(None, callbacks=[pc.ModelPruning("l1_unstructured", amount=0.3)])
    with pytest.raises(NotImplementedError, match=r"renames parameters.*schedule='gpipe'"):
        refuse_callbacks(pruning, DIVIDED)
