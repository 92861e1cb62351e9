"""Modules whose own code, beside the forward and the loss, changes or returns something."""

from __future__ import annotations

from typing import Any

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


class ByHandModel(ExportableModel):
    """Optimizes by hand in a way that other ranks cannot follow.

    Args:
        has_closure: whether it gives a closure, or else steps the optimizer of torch.
    """

    def __init__(self, has_closure: bool) -> None:
        super().__init__(optimizer_name="sgd", scheduler=None)
        self.automatic_optimization = False
        self.has_closure = has_closure

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers(use_pl_optimizer=self.has_closure)
        loss = super().training_step(batch, batch_idx)
        if self.has_closure:
            optimizer.step(closure=lambda: self.manual_backward(loss))
        else:
            self.manual_backward(loss)
            optimizer.step()


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


class AttributeModel(ExportableModel):
    """Its step sets an attribute that forward looks at.

    Args:
        name: ``scale``, which is there from the first on, or ``bonus``, which is not.
        first: step that sets it.
    """

    def __init__(self, name: str, first: int) -> None:
        super().__init__()
        self.name, self.first, self.scale = name, first, 1.0

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return super().forward(left, right) * self.scale + getattr(self, "bonus", 0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step >= self.first:
            setattr(self, self.name, 2.0)
        return super().training_step(batch, batch_idx)


class DropModel(ExportableModel):
    """Its step changes a layer of another rank from the third on, which drops all before.

    Args:
        what: ``p`` or ``training``.
        after: whether it does so after its call of the forward.
    """

    def __init__(self, what: str, after: bool = False) -> None:
        super().__init__()
        self.left.append(nn.Dropout(1.0))
        self.what, self.after = what, after

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) if self.after else None
        if self.global_step >= 2:
            setattr(self.left[-1], self.what, 0.0 if self.what == "p" else False)
        return super().training_step(batch, batch_idx) if loss is None else loss


class CountingModel(ExportableModel):
    """Counts its steps, and adds to a loss that it does not use."""

    num_steps, total = 0, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.num_steps += 1
        self.total += float(loss)
        return loss


class ReplacingModel(ClampingModel):
    """Its step puts another parameter or buffer in the place of one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step >= 2:
            path, _, name = self.name.rpartition(".")
            old = self.get_parameter(self.name) if name == "weight" else self.get_buffer(self.name)
            new = torch.ones(old.shape)
            setattr(self.get_submodule(path), name, nn.Parameter(new) if name == "weight" else new)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


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
