"""Gradients of the step before are let go where Lightning would clear them anyway."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from torch import nn

from lightning_gpp.strategy.state.callbacks import clear_old_gradients


class Watching(lp.LightningModule):
    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks at gradients."""


class Clearing(lp.LightningModule):
    def optimizer_zero_grad(self, *_: Any) -> None:
        """Clears some of them."""


class WatchingCallback(lp.Callback):
    def on_before_zero_grad(self, *_: Any) -> None:
        """Looks at gradients."""


@pytest.mark.parametrize(
    ("module", "callback", "batch_idx", "is_cleared"),
    [
        (lp.LightningModule(), lp.Callback(), 4, True),
        (lp.LightningModule(), lp.Callback(), 5, False),  # the second of two that accumulate
        (Watching(), lp.Callback(), 4, False),
        (Clearing(), lp.Callback(), 4, False),
        (lp.LightningModule(), WatchingCallback(), 4, False),
    ],
    ids=["plain", "accumulates", "module looks", "module clears", "callback looks"],
)
def test_they_are_cleared_where_nobody_notices(
    module: lp.LightningModule, callback: lp.Callback, batch_idx: int, is_cleared: bool
) -> None:
    layer = nn.Linear(2, 1)
    layer(torch.ones(2)).sum().backward()
    trainer: Any = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_idx=batch_idx)),
        accumulate_grad_batches=2,
        lightning_module=module,
        callbacks=[callback],
        optimizers=[torch.optim.SGD(layer.parameters(), 0.1)],
    )
    clear_old_gradients(trainer)
    assert all((p.grad is None) == is_cleared for p in layer.parameters())
