"""On a chain, the pipeline computes what torch's own 1F1B schedule computes."""

from __future__ import annotations

import pytest
import torch
from helpers.models import DataSpec
from helpers.modules import ChainModel, step_record
from helpers.oracle import module_rows, run_schedule_1f1b
from helpers.reference import RELATIVE_TOLERANCE, train_pipeline, weight_differences
from helpers.training import Training
from helpers.workers import WorkerPool


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cuts", [[0, 3, 6], [0, 2, 4, 6]], ids=["2 ranks", "3 ranks"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("num_microbatches", [4, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_outputs_losses_and_gradients(
    pool: WorkerPool, cuts: list[int], dtype: str, num_microbatches: int, schedule: str
) -> None:
    num_ranks = len(cuts) - 1
    data = DataSpec(num_samples=8, batch_size=8, dtype=dtype)
    oracle = pool.run(run_schedule_1f1b, cuts, num_microbatches, data, num_ranks=num_ranks)
    training = Training(ChainModel, data, num_steps=1, validate=False, callbacks=step_record)
    ours = train_pipeline(
        pool,
        training,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        schedule=schedule,
        plan=module_rows(cuts),
    )
    tolerance = RELATIVE_TOLERANCE[dtype]
    expected = {name: grad for step in oracle for name, grad in step.gradients.items()}
    actual = {name: grad for result in ours for name, grad in result.extra["gradients"].items()}
    assert len(expected) == 8
    assert not weight_differences(actual, expected, tolerance)
    seen = ours[0].extra
    close = {"rtol": tolerance, "atol": tolerance}
    losses = oracle[-1].losses
    if schedule == "gpipe":  # the step sees the whole batch
        losses = [torch.stack(losses).mean()]
    torch.testing.assert_close(seen["losses"], losses, **close)
    torch.testing.assert_close(torch.cat(seen["outputs"]), oracle[-1].output, **close)
