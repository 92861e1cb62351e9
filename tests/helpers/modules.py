"""Small modules, data and callbacks, each for one promise of the strategy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as lp
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from helpers.models import DataSpec, ExportableModel, targets_of
from helpers.random_models import INPUT_WIDTHS, NUM_TARGETS, WIDTH, SupervisedModule


class EchoModel(SupervisedModule):
    """Hands its inputs through the pipeline, so that the loss can check them against the labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.left = nn.Linear(INPUT_WIDTHS[0], WIDTH)
        self.right = nn.Linear(INPUT_WIDTHS[1], WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TARGETS)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Any]:
        hidden = self.left(left).tanh() + self.right(right).tanh()
        return {"prediction": self.head(hidden), "echo": (left * 1, right * 1)}

    def step_loss(self, batch: tuple[tuple[Tensor, ...], Tensor]) -> tuple[Tensor, list[Tensor]]:
        inputs, target = batch
        result = self(*inputs)
        torch.testing.assert_close(result["echo"], tuple(inputs), rtol=0, atol=0)
        torch.testing.assert_close(targets_of(result["echo"]), target, rtol=1e-12, atol=1e-12)
        loss = nn.functional.mse_loss(result["prediction"], target)
        return loss, [result["prediction"]]


class MixingData(Dataset[Any]):
    """Every look-up mixes two samples by random numbers of three generators."""

    def __init__(self, num_samples: int = 29) -> None:
        spec = DataSpec(num_samples=num_samples, num_inputs=2)
        self.inputs, _ = spec.tensors()

    def __len__(self) -> int:
        return len(self.inputs[0])

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, ...], Tensor]:
        other = random.randrange(len(self))
        share = float(np.random.rand())
        inputs = tuple(
            share * x[index] + (1 - share) * x[other] + 0.1 * torch.randn(x.shape[1], dtype=x.dtype)
            for x in self.inputs
        )
        return inputs, targets_of(inputs)


def mixing_collate(samples: Sequence[Any]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Mixes the samples of a batch with each other, inputs and labels accordingly."""
    inputs, _ = default_collate(list(samples))
    order = torch.randperm(len(samples))
    share = torch.rand(len(samples), 1, dtype=inputs[0].dtype)
    mixed = tuple(share * x + (1 - share) * x[order] for x in inputs)
    return mixed, targets_of(mixed)


class MetricsModel(ExportableModel):
    """Logs in every way whose result does not depend on how a batch is cut."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss, outputs = self.step_loss(batch)
        _, target = batch
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_epoch_only", loss, on_step=False, on_epoch=True)
        misses = (outputs[0] - target).abs()
        self.log("train_worst", misses.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("train_best", misses.min(), on_step=False, on_epoch=True, reduce_fx=torch.min)
        self.log("train_count", float(len(target)), reduce_fx="sum", on_step=False, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        _, target = batch
        self.log("val_count", float(len(target)), reduce_fx="sum")

    def on_train_epoch_start(self) -> None:
        self.log("epoch_number", float(self.current_epoch))

    def on_validation_epoch_end(self) -> None:
        self.log("val_epoch_number", float(self.current_epoch))


class WrappedModel(SupervisedModule):
    """The part to pipeline is a sub-module; preparation and loss stay around it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.net = nn.Sequential(
            nn.Linear(INPUT_WIDTHS[0], WIDTH), nn.Tanh(), nn.Linear(WIDTH, NUM_TARGETS)
        )

    def call_forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return self.net(inputs[0] * 2) + 0.5


class TrainedAroundModel(WrappedModel):
    """Trainable layers before and after the pipelined sub-module, both at work on one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(INPUT_WIDTHS[0], INPUT_WIDTHS[0])
        self.after = nn.Parameter(torch.ones(NUM_TARGETS))

    def call_forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        prepared = self.before(inputs[0])
        return self.net(prepared) * self.after + prepared.mean(1, keepdim=True)


class UnusedParameterModel(ExportableModel):
    """Has a layer and a buffer that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)
        self.register_buffer("note", torch.arange(3))


class PenaltyModel(ExportableModel):
    """Its loss reads a parameter of its last layer besides."""

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        loss, outputs = super().step_loss(batch)
        return loss + 0.1 * self.head.weight.square().sum(), outputs


def epoch_checkpoints(folder: str) -> list[lp.Callback]:
    """Keeps a checkpoint of every epoch."""
    return [ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)]


class ChainModel(SupervisedModule):
    """A line of layers, the only shape that torch's own pipelines know.

    Attributes:
        outputs: of every ``training_step``, in the order of the calls.
        losses: likewise.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layers = nn.Sequential(
            nn.Linear(INPUT_WIDTHS[0], WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.LayerNorm(2 * WIDTH),
            nn.GELU(),
            nn.Linear(2 * WIDTH, NUM_TARGETS),
        )
        self.outputs: list[Tensor] = []
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, (output,) = self.step_loss(batch)
        self.outputs.append(output.detach())
        self.losses.append(loss.detach())
        self.log("train_loss", loss)
        return loss


class ComparingModel(ChainModel):
    """Its forward compares every sample with the others."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output - output.mean(0, keepdim=True)


class DroppingModel(ChainModel):
    """Its forward draws random numbers in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class DroppingComparingModel(DroppingModel):
    """It also compares every sample with the others, in both modes."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output - output.mean(0, keepdim=True)
