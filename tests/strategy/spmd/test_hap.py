"""``Trainer(strategy="hap")`` trains as one device does: weights, losses, logs, metrics."""

from __future__ import annotations

from functools import partial

import pytest
from helpers.models import FIXED_MODELS, DataSpec
from helpers.random_models import BranchyModel, OptimizerSpec
from helpers.random_programs import DrawsPrograms
from helpers.reference import assert_equal_training
from helpers.training import Training
from helpers.workers import WorkerPool

pytestmark = pytest.mark.timeout(400)

HAP = {"kind": "HAPStrategy"}
UNEVEN = {1: None, 2: [0.7, 0.3], 3: [0.5, 0.2, 0.3]}


def branchy(
    model: str = "two_towers", optimizer: OptimizerSpec | None = None, **options: object
) -> Training:
    """10 steps; 29 samples in batches of 8: every fourth batch has five samples."""
    spec = FIXED_MODELS[model]
    return Training(
        partial(BranchyModel, spec, optimizer or OptimizerSpec()),
        DataSpec(num_inputs=spec.num_inputs),
        num_steps=10,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_by_samples(pool: WorkerPool, num_ranks: int) -> None:
    assert_equal_training(pool, branchy(), num_ranks=num_ranks, shares=UNEVEN[num_ranks], **HAP)


@pytest.mark.parametrize("seed", range(3))
def test_drawn_programs(pool: WorkerPool, seed: int) -> None:
    num_ranks = 2 + seed % 2
    assert_equal_training(
        pool,
        branchy(),
        num_ranks=num_ranks,
        shares=UNEVEN[num_ranks],
        planner=DrawsPrograms(seed),
        **HAP,
    )
