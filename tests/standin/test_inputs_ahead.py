"""A batch that changes uncounted after it was sent: noticed without a wait, and so too late."""

from __future__ import annotations

import pytest
from helpers.ahead import UncountedLate, train_ahead
from helpers.models import DataSpec
from helpers.training import Training
from helpers.workers import WorkerError, WorkerPool


@pytest.mark.parametrize("num_steps", [10, 12], ids=["in the last step", "steps before"])
def test_a_change_that_begins_late_is_an_error(num_steps: int, gpus: WorkerPool) -> None:
    training = Training(UncountedLate, DataSpec(num_inputs=2), num_steps=num_steps, validate=False)
    plan = [["left", "right"], ["fuse", "norm", "head"]]
    strategy = {"plan": plan, "num_microbatches": 4, "schedule": "gpipe"}
    with pytest.raises(WorkerError, match="changed in place in a way that autograd does not"):
        gpus.run(train_ahead, training, strategy, 2, num_ranks=2)
