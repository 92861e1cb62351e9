"""What cannot work on a part of the model, or with it, is refused with the remedy."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from helpers.training import make_trainer
from lightning.pytorch import callbacks as pc
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_gpp import GraphPipeStrategy
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


def test_an_option_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match=r"unknown option 'microbatches'.*: num_microbatches, "):
        GraphPipeStrategy(microbatches=4)


@pytest.mark.parametrize(("pipelines", "num_parts"), [(1, 2), (2, 4)])
def test_a_sampler_that_leaves_out_samples(pipelines: int, num_parts: int) -> None:
    """Scripts written for DDP bring one for every rank, where Lightning's is one per pipeline."""
    strategy, data = GraphPipeStrategy(pipelines=pipelines), TensorDataset(torch.zeros(8))
    strategy._session = mock.Mock()
    strategy._session.run.control.is_leader = True
    loader = DataLoader(data, sampler=DistributedSampler(data, num_parts, 0))
    with pytest.raises(ValueError, match=f"num_replicas={num_parts}, but.*Remove the sampler"):
        strategy.process_dataloader(loader)
