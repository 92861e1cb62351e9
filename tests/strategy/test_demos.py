"""Lightning's demo modules train unmodified, with the results of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers import demos
from helpers.demos import Vectors, Words
from helpers.models import DataSpec
from helpers.reference import assert_equal_training, train_pipeline
from helpers.training import Training
from helpers.workers import WorkerError, WorkerPool

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("build", "data", "strategy"),
    [
        pytest.param(demos.boring, Vectors(dtype="float32"), {}, id="boring"),
        pytest.param(demos.demo, Vectors(), {"num_microbatches": 1}, id="demo"),
        pytest.param(demos.transformer, Words(batch_size=6), {}, id="transformer"),
        pytest.param(
            demos.lstm,
            Words(batch_size=5, in_sequence=True),
            {"module": "model", "num_microbatches": 1},
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
    schedule = "gpipe" if num_ranks == 2 else "1f1b"
    training = Training(build, data, num_steps=10, validate=False)
    assert_equal_training(pool, training, num_ranks=num_ranks, schedule=schedule, **strategy)


def test_a_state_that_goes_on_from_batch_to_batch_is_not_cut(pool: WorkerPool) -> None:
    training = Training(demos.lstm, Words(batch_size=6, in_sequence=True), validate=False)
    with pytest.raises(WorkerError, match=r"self\.hidden.*num_microbatches=1"):
        train_pipeline(pool, training, num_ranks=2, module="model")
