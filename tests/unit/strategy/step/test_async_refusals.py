"""What a pipeline that does not drain refuses, with the remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import nn
from torch.optim import LBFGS, SGD

from lightning_gpp import GraphPipeStrategy
from lightning_gpp.planner import Stage
from lightning_gpp.strategy.settings import (
    fewest_per_update,
    refuse_async_plan,
    refuse_for_async,
)


class Manual(lp.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Clips(lp.LightningModule):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        pass


def refuse(
    module: lp.LightningModule | None = None,
    weights: str = "pipeoptim",
    optimizer: type[torch.optim.Optimizer] = SGD,
    accumulate: int = 1,
    precision: Precision | None = None,
) -> None:
    strategy = GraphPipeStrategy(schedule="1f1b-async", weights=weights)
    trainer: Any = SimpleNamespace(
        lightning_module=module or lp.LightningModule(),
        optimizers=[optimizer([nn.Parameter(torch.ones(1))])],
        accumulate_grad_batches=accumulate,
        precision_plugin=precision or Precision(),
    )
    refuse_for_async(trainer, strategy.settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"module": Manual()}, "manual optimization decides by itself: use automatic"),
        ({"module": Clips()}, "stage by stage: do not override configure_gradient_clipping"),
        ({"optimizer": LBFGS}, "as LBFGS does: use another optimizer"),
        ({"precision": MixedPrecision("16-mixed", "cpu")}, "16-mixed.*use precision='bf16-mixed'"),
        ({"precision": MixedPrecision("bf16-mixed", "cpu")}, "casts: use weights='stash'"),
        ({"accumulate": 2, "weights": "spectrain"}, "is 2: use weights='pipeoptim'"),
    ],
)
def test_what_cannot_go_on_without_draining(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{message}.*, or use schedule='gpipe'"):
        refuse(**arguments)


def test_what_can() -> None:
    refuse()
    refuse(weights="2bw", accumulate=4)
    refuse(weights="pipeoptim", accumulate=4)
    refuse(weights="stash", precision=MixedPrecision("bf16-mixed", "cpu"))


def test_the_fewest_batches_of_an_update() -> None:
    """By which versions of weights are planned; a callback may change it between epochs."""
    assert fewest_per_update(lp.Trainer(accumulate_grad_batches=4, logger=False)) == 4
    scheduled = GradientAccumulationScheduler({0: 8, 2: 3, 5: 4})
    assert fewest_per_update(lp.Trainer(callbacks=[scheduled], logger=False)) == 3


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (Stage(0, ("a",), (0, 1), 2), "stage 0 has 2 replicas: give every stage one"),
        (Stage(0, ("a",), (0,), recompute=True), "stage 0 has recomputation: .*or use"),
    ],
)
def test_stages_that_cannot(stage: Stage, message: str) -> None:
    refuse_async_plan([Stage(0, ("a",), (0,))])
    with pytest.raises(NotImplementedError, match=message):
        refuse_async_plan([stage])
