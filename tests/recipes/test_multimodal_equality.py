"""The recipe trains as a pipeline to the weights, losses and metrics of one device."""

from __future__ import annotations

import pytest
from helpers.recipe_jobs import NUM_STEPS, MomentumClassifier, fit_recipe
from helpers.reference import RELATIVE_TOLERANCE, weight_differences
from helpers.workers import WorkerPool

from lightning_gpp.recipes.multimodal import MultimodalClassifier


@pytest.mark.parametrize(
    ("kind", "dtype", "schedule", "num_ranks"),
    [
        (MultimodalClassifier, "float64", "1f1b", 4),
        (MomentumClassifier, "float32", "gpipe", 3),
    ],
)
def test_equals_one_device(
    pool: WorkerPool,
    kind: type[MultimodalClassifier],
    dtype: str,
    schedule: str,
    num_ranks: int,
) -> None:
    tolerance = RELATIVE_TOLERANCE[dtype]
    expected = fit_recipe(kind, dtype, None)
    strategy = {"num_microbatches": 8, "schedule": schedule, "timeout": 100.0}
    results = pool.run(fit_recipe, kind, dtype, strategy, num_ranks, num_ranks=num_ranks)
    assert not weight_differences(results[0].weights, expected.weights, tolerance)
    assert len(expected.losses) == NUM_STEPS
    for result in results:
        assert result.losses == pytest.approx(expected.losses, rel=10 * tolerance)
        assert result.metrics == pytest.approx(expected.metrics, rel=10 * tolerance)
