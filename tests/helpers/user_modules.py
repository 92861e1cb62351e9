"""Modules whose own code, beside the forward and the loss, changes or returns something."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

from helpers.models import DataSpec, ExportableModel
from helpers.random_models import INPUT_WIDTHS, NUM_TARGETS, WIDTH, OptimizerSpec, SupervisedModule

PLAN = [["left"], ["right"], ["fuse", "norm", "head"]]
"""Three stages of an :class:`ExportableModel`; the last is rank 0's, with the loss."""


class HandMadeRateModel(ExportableModel):
    """Sets the learning rate in the hooks named in ``where``, without a scheduler.

    Args:
        where: hooks and steps.
    """

    def __init__(self, *where: str) -> None:
        super().__init__(optimizer_name="sgd", scheduler=None)
        self.where = where

    def set_rate(self, rate: float) -> None:
        optimizer: Any = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] = rate

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if "on_train_batch_start" in self.where:
            self.set_rate(0.05 / (1 + self.global_step))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        late = "training_step later" in self.where and self.global_step > 0
        if "training_step" in self.where or late:
            self.set_rate(0.03 / (1 + self.global_step))
        loss = super().training_step(batch, batch_idx)
        if "training_step after forward" in self.where:
            self.set_rate(0.04 / (1 + self.global_step))
        return loss

    def on_train_epoch_end(self) -> None:
        if "on_train_epoch_end" in self.where:
            optimizer: Any = self.optimizers()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5


class FreezingModel(ExportableModel):
    """Freezes and thaws whole stages between epochs.

    Args:
        frozen: the stages that do not train, by epoch; the last entry stays.
    """

    def __init__(self, *frozen: tuple[str, ...]) -> None:
        super().__init__(optimizer_name="sgd", scheduler=None)
        self.frozen = frozen
        self.freeze(0)

    def freeze(self, epoch: int) -> None:
        frozen = self.frozen[min(epoch, len(self.frozen) - 1)]
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.split(".")[0] not in frozen)

    def on_train_epoch_end(self) -> None:
        self.freeze(self.current_epoch + 1)


class FreezingInStepsModel(ExportableModel):
    """Every step calls the forward twice, each time without training another part.

    Args:
        how: it freezes and thaws parameters: by "method", by "attribute" or in a "hook" of a
            backward.
    """

    def __init__(self, how: str) -> None:
        super().__init__(optimizer_name="sgd", scheduler=None)
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = []
        for number in (2 * batch_idx, 2 * batch_idx + 1):
            self.freeze(("left", "head", "right", "norm")[number % 4])
            losses.append(super().training_step(batch, batch_idx))
        return losses[0] + losses[1]

    def freeze(self, frozen: str) -> None:
        if self.how != "hook":
            self._freeze(frozen)
            return
        x = torch.ones((), requires_grad=True)
        x.register_hook(lambda _: self._freeze(frozen))
        x.backward()

    def _freeze(self, frozen: str) -> None:
        for name, parameter in self.named_parameters():
            is_trained = name.split(".")[0] != frozen
            if self.how == "attribute":
                parameter.requires_grad = is_trained
            else:
                parameter.requires_grad_(is_trained)


class Gate(nn.Module):
    """A sub-module with an attribute that hooks change and other hooks read."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class AttributeModel(ExportableModel):
    """Plain attributes, changed where the data is, scale every rank's optimizer step."""

    def __init__(self) -> None:
        super().__init__(optimizer_name="sgd", scheduler=None)
        self.norm = Gate()  # type: ignore[assignment]
        self.epoch_scale = 1.0
        self.count = 0

    def on_train_epoch_end(self) -> None:
        self.epoch_scale *= 0.5
        self.norm.scale = 0.25 + self.current_epoch  # type: ignore[assignment]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += len(batch[1])
        self.note = f"new attribute {self.count}"

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        assert self.count == 0 or self.note == f"new attribute {self.count}"
        for group in optimizer.param_groups:
            scale = float(self.norm.scale) / (1 + self.count)  # type: ignore[arg-type]
            group["lr"] = 0.02 * self.epoch_scale * scale
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class StoppingModel(ExportableModel):
    """Stops the training by itself.

    Args:
        where: ``"training_step"`` or ``"on_train_batch_end"``.
        step: after how many optimizer steps.
    """

    def __init__(self, where: str, step: int) -> None:
        super().__init__(optimizer_name="sgd")
        self.where = where
        self.stop_step = step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.where == "training_step" and self.global_step == self.stop_step:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "on_train_batch_end" and self.global_step == self.stop_step + 1:
            self.trainer.should_stop = True


class ClampingModel(ExportableModel):
    """Changes weights in a hook of rank 0.

    Args:
        name: of the parameter or buffer.
        through_data: whether the change goes through ``.data``, which autograd does not see.
    """

    def __init__(self, name: str, through_data: bool = False) -> None:
        super().__init__(optimizer_name="sgd")
        self.name = name
        self.through_data = through_data
        self.left.register_buffer("shift", torch.ones(6))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        joined = torch.cat([self.left(left) + self.left.shift, self.right(right)], dim=1)
        return self.head(self.norm(self.fuse(joined))) + self.offset

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        found = dict(self.named_parameters()) | dict(self.named_buffers())
        with torch.no_grad():
            tensor = found[self.name]
            (tensor.data if self.through_data else tensor).clamp_(-0.1, 0.1)


class TeacherModel(ExportableModel):
    """Keeps moving averages of its weights in buffers, in a hook of rank 0.

    Args:
        is_foreach: whether with the functions that optimizers use.
    """

    def __init__(self, is_foreach: bool = False) -> None:
        super().__init__(optimizer_name="sgd")
        self.is_foreach = is_foreach
        self.teacher = nn.Module()
        for name, parameter in self.named_parameters():
            self.teacher.register_buffer(name.replace(".", "_"), parameter.detach().clone())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        own, averages = list(self.parameters()), list(self.teacher.buffers())
        with torch.no_grad():
            if self.is_foreach:
                torch._foreach_mul_(averages, 0.9)
                torch._foreach_add_(averages, own, alpha=0.1)
            else:
                for average, parameter in zip(averages, own, strict=True):
                    average.mul_(0.9).add_(parameter, alpha=0.1)


class SavingModel(ExportableModel):
    """Saves a checkpoint where only rank 0 is.

    Args:
        where: the hook.
    """

    def __init__(self, where: str) -> None:
        super().__init__(optimizer_name="sgd")
        self.where = where

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.where == "on_train_batch_start":
            self.trainer.save_checkpoint("mine.ckpt")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "on_train_batch_end":
            self.trainer.save_checkpoint("mine.ckpt")


class WaitingModel(ExportableModel):
    """Enters a collective that has no answer where only rank 0 is.

    Args:
        where: the step, the hook or ``"collate"``.
        collective: ``"barrier"``, or ``"broadcast"`` from another rank.
    """

    def __init__(self, where: str, collective: str) -> None:
        super().__init__(optimizer_name="sgd")
        self.where, self.collective = where, collective

    def enter(self, where: str) -> None:
        if where == self.where and not self.trainer.sanity_checking:
            strategy = self.trainer.strategy
            strategy.barrier() if self.collective == "barrier" else strategy.broadcast("x", src=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.enter("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.enter("on_train_batch_end")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.enter("on_before_batch_transfer")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.enter("on_after_batch_transfer")
        return batch


class DetachedLossModel(ExportableModel):
    """Its loss has no gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).detach()


class NotedData(DataSpec):
    """Samples with lists of numbers and dicts of plain values and tensors, as collate left them."""

    def loader(self) -> DataLoader[Any]:
        (x, *_), target = self.tensors()
        samples = [
            {
                "x": x[i],
                "target": target[i],
                "tags": list(range(i % 4)),
                "note": {"weight": 0.5 + i % 3, "bias": x[i][:1].repeat(2) * 0.1, "name": str(i)},
            }
            for i in range(self.num_samples)
        ]
        return DataLoader(samples, self.batch_size, collate_fn=noted_collate)  # type: ignore[arg-type]


def noted_collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Stacks the tensors, leaves the rest in lists."""
    return {
        "x": torch.stack([sample["x"] for sample in samples]),
        "target": torch.stack([sample["target"] for sample in samples]),
        "tags": [sample["tags"] for sample in samples],
        "note": [sample["note"] for sample in samples],
    }


class NotedModel(SupervisedModule):
    """Its loss reads the lists."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.layers = nn.Sequential(
            nn.Linear(INPUT_WIDTHS[0], WIDTH), nn.Tanh(), nn.Linear(WIDTH, NUM_TARGETS)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        output = self(batch["x"])
        losses = []
        rows = zip(output, batch["target"], batch["tags"], batch["note"], strict=True)
        for row, target, tags, note in rows:
            shifted = row + 0.1 * sum(tags) + note["bias"].sum() + 0.01 * int(note["name"])
            losses.append(note["weight"] * (shifted - target).square().mean())
        return torch.stack(losses).mean(), [output]


class TokenLogModel(ExportableModel):
    """Logs one-element tensors, numpy numbers, and a mean over tokens with their number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, (output,) = self.step_loss(batch)
        inputs, _ = batch
        self.log("train_loss", loss)
        self.log("one_element", output.mean().reshape(1), on_step=True, on_epoch=True)
        mean = output.detach().mean().numpy()
        self.log("numpy64", np.float64(mean), on_step=True, on_epoch=True)
        self.log("numpy32", np.float32(mean), on_step=False, on_epoch=True)
        tokens = 1 + (inputs[0][:, 0] > 0).long() * 3
        per_token = (output.detach().mean(1) * tokens).sum() / tokens.sum()
        self.log("per_token", per_token, batch_size=int(tokens.sum()), on_step=True, on_epoch=True)
        return loss


class BatchNormModel(SupervisedModule):
    """Running statistics in an early and in the last stage."""

    def __init__(self) -> None:
        super().__init__(OptimizerSpec("adamw"))
        torch.manual_seed(10)
        self.first = nn.Sequential(nn.Linear(INPUT_WIDTHS[0], WIDTH), nn.BatchNorm1d(WIDTH))
        self.second = nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.third = nn.Sequential(nn.BatchNorm1d(WIDTH, momentum=None), nn.Tanh())
        self.head = nn.Linear(WIDTH, NUM_TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.third(self.second(self.first(x))))


class CountedModel(SupervisedModule):
    """Buffers that every forward changes, whatever the samples are.

    A spectral norm of each kind, a counter that is changed in place, and one that is replaced.
    """

    calls: Tensor
    halves: Tensor

    def __init__(self) -> None:
        super().__init__(OptimizerSpec("sgd"))
        torch.manual_seed(12)
        self.first = parametrizations.spectral_norm(nn.Linear(INPUT_WIDTHS[0], WIDTH))
        self.second = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, NUM_TARGETS)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("halves", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x).tanh())
        self.calls += 1
        self.halves = self.halves + 0.5
        return self.head(hidden) * (1 - 0.5**self.calls) + self.halves


class Centred(nn.Module):
    """Takes off a moving average of what it has seen."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


class CentredModel(SupervisedModule):
    """A moving average of the samples, and a BatchNorm."""

    def __init__(self) -> None:
        super().__init__(OptimizerSpec("sgd"))
        torch.manual_seed(13)
        self.first = nn.Linear(INPUT_WIDTHS[0], WIDTH)
        self.centred = Centred()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.centred(self.first(x))))


class LastEmptyData(DataSpec):
    """Batches of which the one after ``num_full`` others has no samples."""

    num_full = 2

    def loader(self) -> DataLoader[Any]:
        inputs, target = self.tensors()
        ends = [self.batch_size * min(i, self.num_full) for i in range(self.num_full + 2)]
        batches = [
            (tuple(x[a:b] for x in inputs), target[a:b])
            for a, b in zip(ends, ends[1:], strict=False)
        ]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


class FirstEmptyData(LastEmptyData):
    """The first batch has no samples."""

    num_full = 0


class SumModel(ExportableModel):
    """A loss that is a number for a batch without samples, too."""

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        inputs, target = batch
        output = self(*inputs)
        return (output - target).square().sum() / 8, [output]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, _ = self.step_loss(batch)
        self.log("train_loss", loss, batch_size=8)
        return loss


class MeanModel(SumModel):
    """A mean over samples, of which there may be none."""

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        inputs, target = batch
        output = self(*inputs)
        return (output - target).square().sum() / max(1, len(target)), [output]


class SequenceData(DataSpec):
    """Sequences whose length is another one in every batch."""

    def loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.num_samples, 9, INPUT_WIDTHS[0])
        x = torch.randn(shape, generator=generator, dtype=getattr(torch, self.dtype))
        return DataLoader(list(x), self.batch_size, collate_fn=sequence_collate)  # type: ignore[arg-type]


def sequence_collate(samples: list[Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Cuts the batch to a length that its first number decides."""
    x = torch.stack(samples)
    x = x[:, : 2 + int(x[0, 0, 0].abs() * 100) % 8]
    total = x.sin().sum((1, 2)) / x.shape[1]
    return (x,), torch.stack([total, total.cos(), total.tanh()], dim=-1)


class SequenceModel(SupervisedModule):
    """Positions, attention in two heads with a mask of the sequence's length, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embed = nn.Linear(INPUT_WIDTHS[0], WIDTH)
        self.position = nn.Parameter(torch.randn(1, 9, WIDTH) * 0.1)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        size, length, _ = x.shape
        hidden = self.embed(x) + self.position[:, :length]
        split = self.qkv(hidden).reshape(size, length, 3, 2, WIDTH // 2)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (query @ key.transpose(-1, -2)).masked_fill(later, -1e9).softmax(-1)
        mixed = (scores @ value).transpose(1, 2).reshape(size, length, -1)
        return self.head(self.norm(hidden + self.mix(mixed)).sum(1) / length)
