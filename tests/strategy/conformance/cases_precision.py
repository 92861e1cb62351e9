"""Precisions: what is logged, clipped, accumulated and restored is that of one device in the same.

Micro-batches add gradients up in another order, so that numbers differ by roundings of bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from conformance.case import Bench, Case
from conformance.modules import CaseModule

ROUNDING = 8 * 2**-8


class Float32Module(CaseModule):
    """Stays in float32, as autocast leaves float64 alone; so do its batches."""

    def double(self) -> Float32Module:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out = self(x)
        expected = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else torch.float32
        self.log("is_expected", float(out.dtype is expected))
        return nn.functional.mse_loss(out.float(), y.float())


class ByHandModule(Float32Module):
    """Optimizes by hand, its backward inside of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        self.log("train_loss", loss)


class OwnAutocastModule(Float32Module):
    """The step has an autocast of its own around the forward, and another one without."""

    def loss(self, batch: Any) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=not self.training):
            return super().loss(batch)


def resumed(bench: Bench) -> None:
    """Fits, and another Trainer goes on from the checkpoint."""
    bench.fit()
    path = f"{bench.folder}/half.ckpt"
    bench.trainer.save_checkpoint(path)
    bench.trainer = bench.new_trainer(max_epochs=3)
    bench.fit(ckpt_path=path)


def mixed(name: str, module: Any = Float32Module, **options: Any) -> Case:
    """A case in ``bf16-mixed``."""
    trainer = {"precision": "bf16-mixed"} | options.pop("trainer", {})
    return Case(name, trainer, module, tolerance=ROUNDING, **options)


CASES = [
    mixed("bf16-mixed", trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
    mixed("bf16-mixed, resumed", script=resumed),
    mixed("bf16-mixed by hand", ByHandModule, only_whole=True),
    mixed(
        "autocast of the step", OwnAutocastModule, trainer={"precision": "32-true"}, only_whole=True
    ),
]
