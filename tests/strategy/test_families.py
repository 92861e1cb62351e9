"""Every family of models trains as a pipeline to the weights of one device."""

from __future__ import annotations

from functools import partial

import pytest
from helpers.families import FAMILIES, Family, FamilyData
from helpers.reference import assert_equal_training
from helpers.training import Training
from helpers.workers import WorkerPool


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # one device uses them
@pytest.mark.parametrize("index", range(len(FAMILIES)), ids=FAMILIES)
def test_a_family_trains_as_on_one_device(pool: WorkerPool, index: int) -> None:
    network, inputs = list(FAMILIES.values())[index]
    training = Training(
        partial(Family, network), FamilyData(num_samples=18, inputs=inputs), num_steps=5
    )
    assert_equal_training(
        pool,
        training,
        num_ranks=2 + index % 3,
        num_microbatches=3,
        schedule=("gpipe", "1f1b")[index % 2],
    )
