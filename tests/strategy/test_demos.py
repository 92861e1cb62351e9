"""Lightning's demo modules train unmodified, with the results of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers import demos
from helpers.demos import Vectors, Words
from helpers.models import DataSpec
from helpers.reference import assert_equal_training
from helpers.training import Training
from helpers.workers import WorkerPool


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("build", "data", "strategy"),
    [
        pytest.param(demos.boring, Vectors(dtype="float32"), {}, id="boring"),
        pytest.param(demos.demo, Vectors(), {}, id="demo"),
        pytest.param(demos.transformer, Words(batch_size=6), {}, id="transformer"),
        pytest.param(
            demos.lstm,
            Words(batch_size=5, in_sequence=True),
            {"module": "model"},
            id="lstm",
        ),
    ],
)
def test_a_demo_trains_as_on_one_device(
    pool: WorkerPool,
    build: Callable[[], Any],
    data: DataSpec,
    strategy: dict[str, Any],
    num_ranks: int,
) -> None:
    training = Training(build, data, num_steps=10, validate=False)
    assert_equal_training(pool, training, num_ranks=num_ranks, **strategy)


def test_a_transformer_trains_by_micro_batches(pool: WorkerPool) -> None:
    training = Training(demos.transformer, Words(batch_size=6), num_steps=10, validate=False)
    assert_equal_training(pool, training, num_ranks=3, schedule="1f1b")
