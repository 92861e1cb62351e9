"""DLRM trains as a pipeline to the weights, losses and metrics of one device."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.dlrm_jobs import NUM_STEPS, TiedDLRM, fit_dlrm
from helpers.reference import RELATIVE_TOLERANCE, weight_differences
from helpers.workers import WorkerPool

from lightning_gpp.recipes.dlrm import DLRM

ADAMW = {"name": "AdamW", "lr": 0.01, "weight_decay": 0.1}
MOMENTUM = {"name": "SGD", "lr": 0.5, "momentum": 0.9}
ADAGRAD = {"name": "Adagrad", "lr": 0.05}
TABLES_APART = [
    ["tables.user", "tables.history"],
    ["tables.item", "tables.tags"],
    ["tables.context", "bottom"],
    ["interaction", "top"],
]


def assert_equals_one_device(
    pool: WorkerPool,
    options: dict[str, Any],
    dtype: str,
    num_ranks: int,
    strategy: dict[str, Any],
    kind: type[DLRM] = DLRM,
    **trainer_options: Any,
) -> None:
    tolerance = RELATIVE_TOLERANCE[dtype]
    expected = fit_dlrm(kind, options, dtype, None, **trainer_options)
    strategy = {"num_microbatches": 4, "timeout": 100.0} | strategy
    results = pool.run(
        fit_dlrm, kind, options, dtype, strategy, num_ranks, num_ranks=num_ranks, **trainer_options
    )
    assert not weight_differences(results[0].weights, expected.weights, tolerance)
    assert len(expected.losses) >= NUM_STEPS
    assert set(expected.metrics) == {"train_loss", "val_loss", "val_auc", "val_acc"}
    for result in results:
        assert result.losses == pytest.approx(expected.losses, rel=10 * tolerance)
        assert result.metrics == pytest.approx(expected.metrics, rel=10 * tolerance)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "schedule", "num_ranks"),
    [
        (ADAMW, "float64", "1f1b", 4),
        (MOMENTUM, "float32", "gpipe", 3),
    ],
)
def test_equals_one_device(
    pool: WorkerPool, optimizer: dict[str, Any], dtype: str, schedule: str, num_ranks: int
) -> None:
    options = {"optimizer": optimizer}
    assert_equals_one_device(pool, options, dtype, num_ranks, {"schedule": schedule})


def test_tables_on_different_devices_by_hand(pool: WorkerPool) -> None:
    strategy = {"schedule": "1f1b", "plan": TABLES_APART}
    assert_equals_one_device(pool, {"optimizer": ADAMW}, "float64", 4, strategy)


@pytest.mark.parametrize(
    ("kind", "optimizer", "trainer_options"),
    [
        (DLRM, ADAGRAD, {}),
        (DLRM, MOMENTUM, {"accumulate_grad_batches": 2}),
        (TiedDLRM, MOMENTUM, {}),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's Adagrad
def test_sparse_gradients(
    pool: WorkerPool, kind: type[DLRM], optimizer: dict[str, Any], trainer_options: dict[str, Any]
) -> None:
    options = {"sparse_gradients": True, "optimizer": optimizer}
    strategy = {"plan": TABLES_APART}
    assert_equals_one_device(pool, options, "float64", 4, strategy, kind, **trainer_options)
