"""Micro-batches of different sizes, and losses that cutting would change."""

from __future__ import annotations

import pytest
import torch
from helpers.jobs import warnings_of_fit
from helpers.models import DataSpec
from helpers.modules import ChainModel, InBatchLossModel, SumLossModel
from helpers.reference import assert_equal_training
from helpers.training import Training
from helpers.workers import WorkerPool

from lightning_gpp.strategy.microbatches import (
    batch_size,
    cut_batch,
    microbatch_sizes,
    unit_sizes,
)

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("multiples", [(1, 2, 4), (4, 2, 1), (2, 1, 2)])
def test_stages_with_microbatches_of_their_own_size(
    pool: WorkerPool, multiples: tuple[int, ...]
) -> None:
    rows = (["layers.0", "layers.1"], ["layers.2", "layers.3"], ["layers.4", "layers.5"])
    plan = [
        {"modules": row, "microbatch_multiple": multiple}
        for row, multiple in zip(rows, multiples, strict=True)
    ]
    training = Training(ChainModel, DataSpec(dtype="float64"))
    assert_equal_training(pool, training, num_ranks=3, num_microbatches=4, plan=plan)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (SumLossModel, "a sum over samples"),
        (InBatchLossModel, "not a mean over samples"),
        (ChainModel, None),
    ],
)
def test_a_loss_that_cutting_changes_is_reported(
    pool: WorkerPool, build: type, text: str | None
) -> None:
    training = Training(build, DataSpec(dtype="float64"), num_steps=2)
    results = pool.run(warnings_of_fit, training, {"num_microbatches": 4}, 2, num_ranks=2)
    found = [line for line in results[0] if "the loss of training_step" in line]
    assert found == [] if text is None else len(found) == 1 and text in found[0]
    assert not results[1]
    whole = pool.run(warnings_of_fit, training, {"num_microbatches": 1}, 2, num_ranks=2)
    assert whole == [[], []]


def test_cut_batch_keeps_the_structure() -> None:
    batch = {"x": torch.arange(5), "ids": list("abcde"), "pair": (torch.ones(5, 2), None), "n": 3}
    parts = cut_batch(batch, microbatch_sizes(5, 2))
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert [part["ids"] for part in parts] == [["a", "b", "c"], ["d", "e"]]
    assert [part["pair"][0].shape for part in parts] == [(3, 2), (2, 2)]
    assert all(part["n"] == 3 and part["pair"][1] is None for part in parts)


def test_batches_that_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match=r"batch\['b'\] has 3, the first tensor has 2"):
        batch_size({"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(ValueError, match="no tensor"):
        batch_size({"n": 3})
    with pytest.raises(TypeError, match=r"batch\[1\] is a set"):
        batch_size([torch.ones(2), {1, 2}])


@pytest.mark.parametrize(
    ("num_samples", "sizes"),
    [
        (10, [2, 2, 1, 1, 1, 1, 1, 1]),  # the full batch: as many as asked
        (9, [2, 1, 1, 1, 1, 1, 1, 1]),
        (3, [1, 1, 1]),
    ],
)
def test_a_full_batch_gets_as_many_microbatches_as_asked(
    num_samples: int, sizes: list[int]
) -> None:
    assert unit_sizes(num_samples, full=10, asked=8, at_a_time=1) == sizes


def test_a_smaller_batch_keeps_the_size_of_microbatches() -> None:
    # BatchNorm needs more than one sample: 6 of 8 samples make three pairs, not four pieces.
    assert unit_sizes(6, full=8, asked=4, at_a_time=1) == [2, 2, 2]
    assert unit_sizes(5, full=8, asked=4, at_a_time=4) == [2, 1, 1, 1]
    with pytest.raises(ValueError, match="smaller than the 4 micro-batches"):
        unit_sizes(3, full=8, asked=4, at_a_time=4)
