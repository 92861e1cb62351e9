"""What the Trainer and the module show while they run is what the user gave them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as lp
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from conformance.case import Bench, Case
from conformance.modules import CaseData, CaseModule


class NamedLoader(DataLoader[Any]):
    """A loader with an attribute of its own."""

    name = "mine"


def named_loaders() -> Mapping[str, Any]:
    data = CaseData()
    return {
        "train_dataloaders": {
            "a": NamedLoader(data.dataset(1), batch_size=8),
            "b": NamedLoader(data.dataset(2), batch_size=6),
        },
        "val_dataloaders": NamedLoader(data.dataset(3), batch_size=8),
    }


class FirstOfTwoModule(CaseModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx)


class Loaders(lp.Callback):
    """Looks at the Trainer's loaders; where the batches are, it reads them on its own."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {"seen": []}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.look(trainer, trainer.train_dataloader["b"])

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self.look(trainer, trainer.val_dataloaders)

    def look(self, trainer: Any, loader: Any) -> None:
        if trainer.is_global_zero:
            next(iter(loader))
        self.record["seen"].append((type(loader).__name__, isinstance(loader, DataLoader)))
        self.record["seen"].append((loader.name, loader.batch_size, len(loader)))


def the_same_loader(bench: Bench) -> None:
    loaders = bench.data["val_dataloaders"]
    bench.fit()
    bench.everywhere["is the same"] = bench.trainer.val_dataloaders is loaders
    bench.validate()
    bench.everywhere["is still the same"] = bench.trainer.val_dataloaders is loaders


class SignaturesModule(CaseModule):
    """Notes the signatures of what the strategy relays, when it does."""

    def __init__(self) -> None:
        super().__init__()
        self.signatures: list[str] = []
        self.on_train_epoch_end = lambda: self.note("on_train_epoch_end")

    def note(self, *names: str) -> None:
        self.signatures += [f"{name}{inspect.signature(getattr(self, name))}" for name in names]

    def on_fit_start(self) -> None:
        self.note("on_train_batch_start", "on_validation_epoch_end", "on_before_batch_transfer")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Relayed."""

    def on_validation_epoch_end(self) -> None:
        """Relayed."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("log", "forward")
        return super().training_step(batch, batch_idx)


def signatures(bench: Bench) -> None:
    bench.fit()
    bench.on_rank_0["signatures"] = bench.module.signatures
    bench.everywhere["hooks"] = [s for s in bench.module.signatures if s.startswith("on_")][:3]
    bench.everywhere["own attribute"] = "on_train_epoch_end" in vars(bench.module)


class Copies(lp.Callback):
    """Copies the Trainer's callbacks; it knows the Trainer, as a progress bar does."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {"copied": []}

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.trainer = trainer

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        copied = copy.deepcopy(trainer.callbacks)
        self.record["copied"].append([type(callback).__name__ for callback in copied])

    def on_validation_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.on_train_batch_start(trainer)


def set_up_early(bench: Bench) -> None:
    """Loaders are asked for before any process knows of another."""
    loader, trainer = bench.data["train_dataloaders"], bench.trainer
    bench.everywhere["processed"] = trainer.strategy.process_dataloader(loader) is loader
    trainer.strategy.connect(bench.module)
    trainer._data_connector.attach_data(bench.module, train_dataloaders=loader)
    trainer.state.fn, trainer.training = "fit", True
    trainer.fit_loop.setup_data()
    bench.everywhere["batches"] = trainer.num_training_batches
    bench.fit()


class InvalidLogsModule(CaseModule):
    """Logs what cannot be logged in its very first step, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("valid", 1.0, on_step=True)
        self.refused("text", "1")
        self.refused("nothing", None)
        self.refused("nested", {"a": {"b": 1}})
        self.refused("valid", 1.0, on_step=False, on_epoch=True)
        self.refused("other", 1.0, reduce_fx="median")
        self.log("by position", batch[0].max(), True, False, True, True, "max", False, False, None)
        return super().training_step(batch, batch_idx)

    def refused(self, name: str, value: Any, **kwargs: Any) -> None:
        try:
            self.log(name, value, **kwargs)
        except (ValueError, MisconfigurationException) as error:
            self.errors.append(f"{type(error).__name__}: {error}")


def invalid_logs(bench: Bench) -> None:
    bench.fit()
    bench.on_rank_0["errors"] = bench.module.errors


class ListsModule(CaseModule):
    """Fills lists where rank 0 is alone, and looks at them where all are."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Any] = []
        self.last: list[Any] = ["none"]
        self.batches: list[Any] = []
        self.record: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        self.batches.append(batch)
        self.pair = [batch_idx, self.current_epoch]
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.last.clear()
        self.last.append(float(self.losses[-1]))

    def on_train_end(self) -> None:
        self.record = {"losses": [float(each) for each in self.losses], "last": list(self.last)}
        self.record["pair"] = list(self.pair)


def lists(bench: Bench) -> None:
    bench.fit()
    bench.everywhere["lists"] = bench.module.record


class ToggledModule(CaseModule):
    """Notes what is frozen while an optimizer is toggled."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.frozen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            with optimizer.toggle_model():
                self.frozen.append(sum(not p.requires_grad for p in self.parameters()))
                self.manual_backward(self.loss(batch))
                optimizer.step()
                optimizer.zero_grad()
        self.frozen.append(sum(not p.requires_grad for p in self.parameters()))

    def configure_optimizers(self) -> Any:
        parts = (self.left, self.head)
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in parts]


def toggled(bench: Bench) -> None:
    bench.fit()
    bench.everywhere["frozen"] = bench.module.frozen


CASES = [
    Case(
        "loaders",
        module=FirstOfTwoModule,
        data=named_loaders,
        callbacks=lambda: [Loaders()],
        script=the_same_loader,
        only_whole=True,
    ),
    Case("signatures", module=SignaturesModule, script=signatures, only_whole=True),
    Case("copies of callbacks", callbacks=lambda: [Copies()]),
    Case("loaders before the environment", script=set_up_early),
    Case("lists that steps fill", module=ListsModule, script=lists, only_whole=True),
    Case("toggling", module=ToggledModule, script=toggled, only_whole=True),
    Case(
        "invalid logs in the first step",
        {"limit_val_batches": 0},
        InvalidLogsModule,
        script=invalid_logs,
        only_whole=True,
    ),
]
