"""Trainings on GPUs end with the weights of one CPU."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.models import DataSpec, ExportableModel
from helpers.training import Training, train
from helpers.workers import WorkerPool

TRAINING = Training(ExportableModel, DataSpec(num_inputs=2), num_steps=6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_of_gpus(gpus: WorkerPool, num_ranks: int, schedule: str) -> None:
    expected = train(TRAINING, None)
    strategy: dict[str, Any] = {"num_microbatches": 4, "schedule": schedule}
    found = gpus.run(train, TRAINING, strategy, num_ranks, num_ranks=num_ranks)[0]
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    for name, weight in expected.weights.items():
        assert found.weights[name].numpy() == pytest.approx(weight.numpy(), rel=1e-9)
