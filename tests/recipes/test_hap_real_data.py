"""Divided by HAP, recipes reach what one device reaches on real data."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as lp
import pytest
from helpers.training import make_trainer, quiet
from helpers.workers import WorkerPool

from lightning_gpp.recipes.dlrm import DLRM, Adult
from lightning_gpp.recipes.multimodal import MultimodalClassifier, MultipleFeatures

DATA_ROOT = os.environ.get("LIGHTNING_GPP_DATA")

pytestmark = pytest.mark.skipif(DATA_ROOT is None, reason="LIGHTNING_GPP_DATA is not set")

RECIPES: dict[str, tuple[Any, Any, str, float]] = {
    "adult": (Adult, DLRM, "val_auc", 0.8),
    "mfeat": (MultipleFeatures, MultimodalClassifier, "val_acc", 0.9),
}
"""Name -> data, module, metric, and what an epoch brings it to at least."""


def metrics_of_an_epoch(
    name: str, root: str | None, strategy: dict[str, Any] | None, num_ranks: int = 1
) -> dict[str, float]:
    """Where the data are is said: workers keep the environment of the test that started them."""
    data_class, module_class, *_ = RECIPES[name]
    lp.seed_everything(0, verbose=False)
    with quiet():
        data = data_class(root)
        module = module_class.for_data(data)
        trainer = make_trainer(strategy, num_ranks, max_epochs=1)
        trainer.fit(module, datamodule=data)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("name", list(RECIPES))
def test_the_metric_of_one_device(pool: WorkerPool, name: str) -> None:
    *_, metric, least = RECIPES[name]
    expected = metrics_of_an_epoch(name, DATA_ROOT, None)
    strategy = {"kind": "HAPStrategy", "shares": [0.7, 0.3], "timeout": 100.0}
    for found in pool.run(metrics_of_an_epoch, name, DATA_ROOT, strategy, 2, num_ranks=2):
        assert found == pytest.approx(expected, rel=1e-3)
        assert found[metric] > least
