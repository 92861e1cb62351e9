"""After user code raised the module is whole on all ranks: it can be saved, and trains on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import pytest
from helpers.training import real_tensors
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from conformance.case import Bench, Case
from conformance.modules import CaseData, CaseModule

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


class SavesInFolder(OnExceptionCheckpoint):
    """Writes into the Trainer's folder."""

    def setup(self, trainer: lp.Trainer, pl_module: lp.LightningModule, stage: str) -> None:
        self.dirpath = trainer.default_root_dir


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
    """A fit that raises; the bench notes what it left."""
    with pytest.raises(ValueError, match="this happens once") as caught:
        bench.fit()
    assert type(caught.value) is ValueError, "a script handles it alike on all ranks"
    bench.note("failed", weights=real_tensors(bench.module))


def fails_and_fits(bench: Bench) -> None:
    """The same module trains on, with another Trainer, and is tested."""
    fails(bench)
    bench.new_trainer(callbacks=[])
    bench.fit()
    bench.test()


def fails_and_goes_on(bench: Bench) -> None:
    """The same module trains on with the same Trainer."""
    fails(bench)
    bench.fit()


def fails_and_resumes(bench: Bench) -> None:
    """Another module goes on from the checkpoint that was written as the first one failed."""
    fails(bench)
    (path,) = Path(bench.folder).rglob("raised.ckpt")
    bench.module = CaseModule().double()
    bench.new_trainer(callbacks=[], enable_checkpointing=False)
    bench.fit(ckpt_path=path)


def raised(name: str, module: Callable[[], lp.LightningModule], **options: Any) -> Case:
    """A case whose fit raises once, after which the module trains on."""
    return Case(name, **{"module": module, "script": fails_and_fits} | options)


def misspelled() -> list[lp.Callback]:
    return [EarlyStopping("los", check_on_train_epoch_end=True)]


def fails_to_stop(bench: Bench) -> None:
    """A monitor that nothing logs."""
    with pytest.raises(RuntimeError, match="Early stopping conditioned on metric `los`"):
        bench.fit()
    bench.note("failed", weights=real_tensors(bench.module))
    bench.new_trainer(callbacks=[])
    bench.fit()


CASES = (
    raised("in a training step", lambda: RaisingModule("training_step")),
    raised("after the forward", RaisingAfterForward),
    raised("with the same Trainer", RaisingAfterForward, script=fails_and_goes_on),
    raised("in a validation step", lambda: RaisingModule("validation_step")),
    raised("in a hook", lambda: RaisingModule("on_train_batch_end")),
    raised("in a transfer", lambda: RaisingModule("on_before_batch_transfer", 12)),
    raised(
        "in a callback of all ranks",
        CaseModule,
        callbacks=lambda: [RaisingCallback("on_train_batch_end")],
    ),
    raised("a misspelled monitor", CaseModule, callbacks=misspelled, script=fails_to_stop),
    raised(
        "a callback writes a checkpoint",
        CaseModule,
        script=fails_and_resumes,
        trainer={"enable_checkpointing": True},
        callbacks=lambda: [
            RaisingCallback("on_train_epoch_start", 2),
            SavesInFolder("", filename="raised"),
        ],
    ),
    raised("before a step by hand", RaisingByHand),
    raised("in the data", CaseModule, data=raising_data),
    raised(
        "while gradients are collected",
        RaisingAfterForward,
        trainer={"accumulate_grad_batches": 3},
    ),
    raised(
        "a checkpoint is written",
        lambda: RaisingModule("training_step"),
        script=fails_and_resumes,
        trainer={"enable_checkpointing": True},
        callbacks=lambda: [
            ModelCheckpoint(
                save_on_exception=True,
                filename="raised",
                every_n_epochs=100,
                save_on_train_epoch_end=False,
            )
        ],
    ),
)
