"""An error of user code is that of all ranks; the processes can train another module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from conformance.case import Bench, Case
from conformance.modules import CaseData, CaseModule
from lightning_gpp.strategy.ranks.failure import PeerError

LIMIT = 6
"""Of what is done before it fails, once: in the second epoch."""


class Once:
    """Raises at one call of many."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.left = limit

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise ValueError("this happens once")


class RaisingModule(CaseModule):
    """Raises in a hook or step, before what it calls.

    Args:
        where: its name.
        limit: calls of it that end with that.
    """

    def __init__(self, where: str, limit: int = LIMIT) -> None:
        super().__init__()
        self.once = Once(limit)
        setattr(self, where, self._raising(getattr(self, where)))

    def _raising(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def raising(*args: Any, **kwargs: Any) -> Any:
            self.once()
            return method(*args, **kwargs)

        return raising


class RaisingAfterForward(CaseModule):
    """Raises between the forward and the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.once = Once()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.once()
        return loss


class RaisingByHand(CaseModule):
    """Optimizes by hand; raises between backward and step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.once = Once()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.once()
        optimizer.step()


class RaisingCallback(lp.Callback):
    """Raises in a hook, on all ranks.

    Args:
        where: its name.
        limit: calls of it that end with that.
    """

    def __init__(self, where: str, limit: int = LIMIT) -> None:
        once = Once(limit)
        setattr(self, where, lambda *_: once())


class RaisingDataset(TensorDataset):
    """Raises when a sample is read.

    Args:
        tensors: of the samples.
    """

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.once = Once(40)

    def __getitem__(self, index: Any) -> Any:
        self.once()
        return super().__getitem__(index)


def raising_data() -> Mapping[str, Any]:
    data = CaseData()
    training = RaisingDataset(*data.dataset(1, 29).tensors)
    return dict(data.arguments()) | {"train_dataloaders": DataLoader(training, batch_size=8)}


def fails(bench: Bench) -> None:
    """A fit that raises on all ranks."""
    with pytest.raises((ValueError, PeerError), match="this happens once"):
        bench.fit()


def starts_anew(bench: Bench) -> None:
    """Another module, with another Trainer."""
    torch.manual_seed(1)
    bench.module = CaseModule().double()
    bench.new_trainer(callbacks=[])


def fails_and_fits(bench: Bench) -> None:
    """Another module is trained and tested afterwards."""
    fails(bench)
    starts_anew(bench)
    bench.fit()
    bench.test()


def raised(name: str, module: Callable[[], lp.LightningModule], **options: Any) -> Case:
    """A case whose fit raises once, after which another module is trained."""
    return Case(name, **{"module": module, "script": fails_and_fits} | options)


def misspelled() -> list[lp.Callback]:
    return [EarlyStopping("los", check_on_train_epoch_end=True)]


def fails_to_stop(bench: Bench) -> None:
    """A monitor that nothing logs."""
    with pytest.raises(RuntimeError, match="Early stopping conditioned on metric `los`"):
        bench.fit()
    starts_anew(bench)
    bench.fit()


CASES = (
    raised("in a training step", lambda: RaisingModule("training_step")),
    raised("after the forward", RaisingAfterForward),
    raised("in a validation step", lambda: RaisingModule("validation_step")),
    raised("in a hook", lambda: RaisingModule("on_train_batch_end")),
    raised("in a transfer", lambda: RaisingModule("on_before_batch_transfer", 12)),
    raised(
        "in a callback of all ranks",
        CaseModule,
        callbacks=lambda: [RaisingCallback("on_train_batch_end")],
    ),
    raised("a misspelled monitor", CaseModule, callbacks=misspelled, script=fails_to_stop),
    raised("before a step by hand", RaisingByHand),
    raised("in the data", CaseModule, data=raising_data),
    raised(
        "while gradients are collected",
        RaisingAfterForward,
        trainer={"accumulate_grad_batches": 3},
    ),
)
