"""Manual optimization with one optimizer: the user's step calls backward and the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import lr_scheduler

from conformance.case import Bench, calls, odd
from conformance.modules import CaseModule


class ManualModule(CaseModule):
    """Zeroes, goes backward and steps; subclasses do it in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.optimize(optimizer, batch, batch_idx)
        if loss is not None:
            self.log("train_loss", loss, on_step=True, on_epoch=True)

    def optimize(self, optimizer: Any, batch: Any, batch_idx: int) -> Tensor | None:
        """One step; returns the loss to log."""
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.before_step(optimizer)
        optimizer.step()
        return loss

    def before_step(self, optimizer: Any) -> None:
        """What is done with the gradients."""


class PartsModule(ManualModule):
    """A backward per part of the batch, then one step; the parts differ in size."""

    def optimize(self, optimizer: Any, batch: Any, batch_idx: int) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in zip(batch[0].split(3), batch[1].split(3), strict=True):
            loss = self.loss((x, y)) * len(x) / len(batch[0])
            self.manual_backward(loss)
            total = total + loss.detach()
        optimizer.step()
        return total


class EveryThirdModule(ManualModule):
    """Gradients of three batches make a step; those of an epoch's end go on into the next."""

    def optimize(self, optimizer: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) / 3
        self.manual_backward(loss)
        if (batch_idx + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class LateZeroModule(ManualModule):
    """Zeroes after the step, to zeros and not to None, which momentum notices."""

    def optimize(self, optimizer: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx != 1:
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=batch_idx == 2)
        return loss


class RestlessModule(ManualModule):
    """No step for the first batch, several for the others; one without any forward."""

    def optimize(self, optimizer: Any, batch: Any, batch_idx: int) -> Tensor | None:
        for number in range(batch_idx):
            x, y = batch
            optimizer.zero_grad()
            self.manual_backward(self.loss((x + 0.1 * number, y)))
            optimizer.step()
        if batch_idx == 3:
            optimizer.step()  # once more with the same gradients
        return self.loss(batch).detach() if batch_idx else None


class ClippingModule(ManualModule):
    """Clips by hand.

    Args:
        algorithm: ``"norm"`` or ``"value"``.
        limit: of the norm, or of every element.
    """

    def __init__(self, algorithm: str, limit: float) -> None:
        super().__init__()
        self.algorithm, self.limit = algorithm, limit

    def before_step(self, optimizer: Any) -> None:
        self.clip_gradients(
            optimizer, gradient_clip_val=self.limit, gradient_clip_algorithm=self.algorithm
        )


class TwoLossesModule(ManualModule):
    """Two backwards through one call, which keeps its graph for the second."""

    def optimize(self, optimizer: Any, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        optimizer.zero_grad()
        output = self(x)
        first, second = F.mse_loss(output, y), output.logsumexp(0).mean()
        self.manual_backward(first, retain_graph=True)
        if batch_idx == 1:
            optimizer.zero_grad()
        self.manual_backward(second)
        optimizer.step()
        return first + second


class TwoCallsModule(ManualModule):
    """A backward for each of two calls, the later call last or first, by turns."""

    def optimize(self, optimizer: Any, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        losses = [F.mse_loss(self(x), y), 0.5 * F.mse_loss(self(-x[1:]), y[1:])]
        optimizer.zero_grad()
        for loss in losses if batch_idx % 2 else reversed(losses):
            self.manual_backward(loss)
        optimizer.step()
        return losses[0] + losses[1]


class ScheduledModule(ManualModule):
    """Steps schedulers by hand: one every batch, one every epoch by its loss.

    Args:
        in_hook: whether the epoch's is stepped in ``on_train_epoch_end``.
    """

    def __init__(self, *, in_hook: bool) -> None:
        super().__init__()
        self.in_hook = in_hook
        self.total = 0.0

    def optimize(self, optimizer: Any, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().optimize(optimizer, batch, batch_idx)
        assert loss is not None
        self.total += loss.item()
        schedulers: Any = self.lr_schedulers()
        schedulers[0].step()
        if self.trainer.is_last_batch and not self.in_hook:
            schedulers[1].step(self.total)
            self.total = 0.0
        self.log("rate", optimizer.param_groups[0]["lr"])
        return loss

    def on_train_epoch_end(self) -> None:
        if self.in_hook:
            schedulers: Any = self.lr_schedulers()
            schedulers[1].step(self.total)
            self.total = 0.0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return [optimizer], [lr_scheduler.ExponentialLR(optimizer, 0.95), plateau]


# Resuming ----------------------------------------------------------------------------------------


def resume(bench: Bench) -> None:
    """Fit, save, and go on with another Trainer and a new module; what the file counts."""
    bench.fit()
    path = Path(bench.folder, "saved.ckpt")
    bench.trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    bench.everywhere["saved"] = [saved["global_step"], len(saved["optimizer_states"])]
    bench.on_rank_0["schedulers"] = saved["lr_schedulers"]
    bench.module = bench.case.module().double()
    bench.new_trainer(max_epochs=4)
    bench.fit(ckpt_path=path)


CASES = [
    odd("one optimizer", ManualModule, script=calls("validate", "fit", "test", "predict")),
    odd("several backwards for a step", PartsModule),
    odd("a step every third batch", EveryThirdModule),
    odd("gradients of zeros, and none", LateZeroModule),
    odd("none to four steps per batch", RestlessModule),
    odd("clipped by norm", lambda: ClippingModule("norm", 0.05)),
    odd("clipped by value", lambda: ClippingModule("value", 0.005)),
    odd("two losses of one call", TwoLossesModule),
    odd("two losses of two calls", TwoCallsModule),
    odd("schedulers in the step", lambda: ScheduledModule(in_hook=False)),
    odd("schedulers in a hook", lambda: ScheduledModule(in_hook=True)),
    odd("resumed", EveryThirdModule, script=resume),
    odd("resumed with schedulers", lambda: ScheduledModule(in_hook=False), script=resume),
]
