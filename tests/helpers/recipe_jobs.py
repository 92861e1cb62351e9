"""The multimodal recipe, trained for a few steps on one device or as a rank of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as lp
import torch
from torch import Tensor

from helpers.training import Recording, Result, make_trainer, quiet
from lightning_gpp.recipes.multimodal import Digits, MultimodalClassifier

NUM_STEPS = 6


class MomentumClassifier(MultimodalClassifier):
    """The recipe's model with SGD."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class RecipeRun:
    """What a short run of the recipe gave on this rank."""

    weights: dict[str, Tensor]
    losses: list[float]
    metrics: dict[str, float]


def fit_recipe(
    kind: type[MultimodalClassifier],
    dtype: str,
    strategy: dict[str, Any] | None,
    num_ranks: int = 1,
) -> RecipeRun:
    """Trains the recipe on the shipped digits: six steps of batches of 80.

    Args:
        kind: class of the model.
        dtype: of weights and data.
        strategy: arguments of ``GraphPipeStrategy``; None trains on one plain device.
        num_ranks: ranks of the job.
    """
    lp.seed_everything(4, verbose=False)
    result = Result()
    with quiet():
        data = Digits(batch_size=80)
        data.setup("fit")
        module = kind.for_data(data, encoder_width=16)
        trainer = make_trainer(
            strategy,
            num_ranks,
            max_steps=NUM_STEPS,
            precision={"float64": "64-true", "float32": "32-true"}[dtype],
            callbacks=[Recording(result)],
            val_check_interval=3,
        )
        trainer.fit(module, datamodule=data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = {n: t.detach() for n, t in module.state_dict().items() if not t.is_meta}
    return RecipeRun(weights, result.losses, metrics)
