"""The dlrm recipe, trained for a few steps on one device or as a rank of a pipeline."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as lp

from helpers.recipe_jobs import RecipeRun
from helpers.training import Recording, Result, make_trainer, quiet
from lightning_gpp.recipes.dlrm import DLRM, Clicks

NUM_STEPS = 10


class TiedDLRM(DLRM):
    """The recipe's model with one matrix for items, be they shown now or earlier."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tables["item"].weight = self.tables["history"].weight


def fit_dlrm(
    kind: type[DLRM],
    options: dict[str, Any],
    dtype: str,
    strategy: dict[str, Any] | None,
    num_ranks: int = 1,
    **trainer_options: Any,
) -> RecipeRun:
    """Trains DLRM on a small click log: 10 steps of batches of 48, the 7th of 32.

    Args:
        kind: class of the model.
        options: of the model.
        dtype: of weights and data.
        strategy: arguments of ``GraphPipeStrategy``; None trains on one plain device.
        num_ranks: ranks of the job.
        trainer_options: further ones of the Trainer.
    """
    lp.seed_everything(4, verbose=False)
    result = Result()
    with quiet():
        data = Clicks(num_samples=400, batch_size=48)
        module = kind.for_data(data, bottom_widths=(12, 8), top_widths=(12,), **options)
        trainer = make_trainer(
            strategy,
            num_ranks,
            max_steps=NUM_STEPS,
            precision={"float64": "64-true", "float32": "32-true"}[dtype],
            callbacks=[Recording(result)],
            **trainer_options,
        )
        trainer.fit(module, datamodule=data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = {n: t.detach() for n, t in module.state_dict().items() if not t.is_meta}
    return RecipeRun(weights, result.losses, metrics)
