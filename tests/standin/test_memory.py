"""What a GPU holds: its own stages, never more of the model than that."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from helpers.training import make_trainer, quiet
from helpers.workers import WorkerPool
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from standin.test_waits import Blocks

WIDTH, NUM_BLOCKS, BATCH = 256, 20, 32
BLOCK_BYTES = (WIDTH * WIDTH + 3 * WIDTH) * 4
ACTIVATION_BYTES = BATCH * WIDTH * 4
OWN_BYTES = 6 * BLOCK_BYTES + 24 * ACTIVATION_BYTES
"""Of a rank with one block: weights, gradients, momentum and a temporary, and the weights and
gradients of a block that is being measured; activations."""
MODEL_BYTES = NUM_BLOCKS * BLOCK_BYTES
PLAN = [[f"blocks.{index}" for index in range(NUM_BLOCKS - 1)], [f"blocks.{NUM_BLOCKS - 1}"]]
"""The last stage, with the loss, is that of rank 0."""


class InBackground(AsyncCheckpointIO):
    """Saves copies of what it is given, which are made where that is."""

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        leaves = pytree.tree_leaves(checkpoint)
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        assert devices == {"cpu"}
        super().save_checkpoint(checkpoint, *args, **kwargs)


class Saves(lp.Callback):
    """Saves a checkpoint of the whole model in the middle."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: lp.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def peak_bytes(path: str) -> int:
    """Trains, saves, and puts the model together at the end; the most this rank's GPU held."""
    strategy = {"plan": PLAN, "cache": False, "num_microbatches": 2}
    with quiet():
        options = {"callbacks": [Saves(path)], "plugins": [InBackground()]}
        trainer = make_trainer(strategy, 2, max_steps=4, **options)
        batches = torch.randn(4, BATCH, WIDTH)
        torch.cuda.reset_peak_memory_stats(trainer.strategy.root_device)
        before = torch.cuda.memory_allocated(trainer.strategy.root_device)  # of earlier tests
        trainer.fit(Blocks(WIDTH, NUM_BLOCKS), DataLoader(list(batches), batch_size=None))
    return torch.cuda.max_memory_allocated(trainer.strategy.root_device) - before


def little_room(strategy: dict[str, Any], room_bytes: int) -> tuple[list[str], int]:
    """Others have taken all but so much of each GPU by the time that ranks are connected.

    Returns:
        Warnings about memory, and operators of the first stage.
    """
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (room_bytes, room_bytes))
        patch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        trainer = make_trainer({**strategy, "cache": False}, 2, max_steps=1)
        trainer.fit(Blocks(WIDTH, NUM_BLOCKS), DataLoader(torch.randn(1, BATCH, WIDTH), None))
    told = [str(each.message) for each in caught if "run out of memory" in str(each.message)]
    plan = trainer.strategy.plan
    assert plan is not None
    return told, len(plan.stages[0].operators)


def test_a_gpu_with_less_room_than_the_plan_needs(gpus: WorkerPool) -> None:
    (told, _), *others = gpus.run(little_room, {"plan": PLAN}, 8 * BLOCK_BYTES, num_ranks=2)
    assert len(told) == 1 and "on rank 1, whose device has" in told[0]
    assert [texts for texts, _ in others] == [[]]


def test_the_planner_is_asked_again_with_the_room_that_is_left(gpus: WorkerPool) -> None:
    """Replicas of the whole model, which it takes first, do not fit; stages do."""
    (told, of_first), _ = gpus.run(little_room, {}, 3 * MODEL_BYTES, num_ranks=2)
    assert told == [] and of_first < 4 * NUM_BLOCKS


def test_rank_0_holds_its_own_stage_only(gpus: WorkerPool, tmp_path: Path) -> None:
    assert 2 * OWN_BYTES < MODEL_BYTES, "too small to show a model that passes by"
    peak = gpus.run(peak_bytes, str(tmp_path / "model.ckpt"), num_ranks=2)[0]
    assert peak < OWN_BYTES
