"""Callbacks that cannot work on a part of the model are refused with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conformance.modules import CaseData, CaseModule
from helpers.alike import differences
from helpers.training import make_trainer, quiet, real_tensors
from helpers.workers import WorkerPool
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
    trainer = make_trainer(None, callbacks=[pc.Timer(), callback], enable_checkpointing=True)
    with pytest.raises(NotImplementedError, match=f"{type(callback).__name__}.*{remedy}"):
        refuse_callbacks(trainer, num_ranks=2)


def test_others_are_taken() -> None:
    taken = [pc.Timer(), pc.BackboneFinetuning(), pc.ModelCheckpoint()]
    trainer = make_trainer(None, callbacks=taken, enable_checkpointing=True)
    refuse_callbacks(trainer, num_ranks=2)


def test_one_rank_holds_all_weights() -> None:
    taken = [pc.WeightAveraging(), pc.BatchSizeFinder()]
    trainer = make_trainer(None, callbacks=taken, enable_checkpointing=True)
    refuse_callbacks(trainer, num_ranks=1)
    pruning = make_trainer(None, callbacks=[pc.ModelPruning("l1_unstructured", amount=0.3)])
    with pytest.raises(NotImplementedError):
        refuse_callbacks(pruning, num_ranks=1)


AVERAGING: dict[str, Callable[[], pc.Callback]] = {
    "exponential": lambda: pc.EMAWeightAveraging(decay=0.9),
    "at the end": lambda: pc.StochasticWeightAveraging(0.1, swa_epoch_start=1),
}


def averaged(name: str, strategy: dict[str, Any] | None) -> dict[str, Any]:
    with quiet():
        module = CaseModule().double()
        trainer = make_trainer(strategy, max_epochs=3, callbacks=[AVERAGING[name]()])
        trainer.fit(module, CaseData().loader(1))
    return real_tensors(module)


@pytest.mark.parametrize("name", AVERAGING)
def test_averaging_on_one_rank_is_that_of_one_device(pool: WorkerPool, name: str) -> None:
    (found,) = pool.run(averaged, name, {"num_microbatches": 4}, num_ranks=1)
    assert not differences(found, averaged(name, None), "weights", 1e-9)
