"""Loops: limits, intervals, several dataloaders, several calls on one Trainer, resuming."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as lp
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from conformance.case import Bench, Case, calls
from conformance.modules import CaseData, CaseModule


class Counts(lp.Callback):
    """Counts batches by kind, on every rank."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {"validated at": [], "epochs of loaders": []}

    def _count(self, name: str) -> None:
        self.record[name] = self.record.get(name, 0) + 1

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._count("train")

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        self._count(f"{'sanity' if trainer.sanity_checking else 'val'} {args[5:]}")

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        self.record["validated at"].append(trainer.global_step)

    def on_test_batch_end(self, trainer: Any, *args: Any) -> None:
        self._count(f"test {args[5:]}")

    def on_predict_batch_end(self, trainer: Any, *args: Any) -> None:
        self._count(f"predict {args[5:]}")


def counted(name: str, trainer: dict[str, Any] | None = None, **options: Any) -> Case:
    """A case that counts batches too."""
    return Case(name, trainer or {}, callbacks=lambda: [Counts()], **options)


# Several dataloaders -----------------------------------------------------------------------------


class ManyLoadersModule(CaseModule):
    """Takes the number of the loader, logs under names with and without it."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        self.log(f"val_loss_{'ab'[dataloader_idx]}", loss, add_dataloader_idx=False)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.loss(batch) + dataloader_idx, on_step=True, on_epoch=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return dataloader_idx, batch_idx, self(batch[0])


def many_loaders() -> dict[str, Any]:
    data = CaseData()
    return {
        "train_dataloaders": data.loader(1, 20),
        "val_dataloaders": [data.loader(2, 10), data.loader(3, 17)],
        "test_dataloaders": {"first": data.loader(4, 9), "second": data.loader(5, 3)},
        "predict_dataloaders": [data.loader(6, 9), data.loader(7, 21)],
    }


class CombinedModule(CaseModule):
    """Trains and validates on batches of several loaders at once; some have ended already."""

    def loss(self, batch: Any) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else list(batch)
        parts = [part for part in parts if part is not None]
        return super().loss([torch.cat(column) for column in zip(*parts, strict=True)])


def combined(mode: str) -> Callable[[], dict[str, Any]]:
    """Data of two loaders of different lengths; equal batches, so that all are cut."""

    def make() -> dict[str, Any]:
        data = CaseData(batch_size=4)
        loaders = {"a": data.loader(1, 12), "b": data.loader(2, 20)}
        others = [data.loader(3, 8), data.loader(4, 15)]
        return {
            "train_dataloaders": CombinedLoader(loaders, mode),
            "val_dataloaders": CombinedLoader(others, mode),
        }

    return make


def in_sequence() -> dict[str, Any]:
    data = CaseData(batch_size=4)
    loaders = CombinedLoader([data.loader(2, 10), data.loader(3, 7)], "sequential")
    return many_loaders() | {"val_dataloaders": loaders, "predict_dataloaders": loaders}


def plain_collection() -> dict[str, Any]:
    data = CaseData(batch_size=4)
    return {"train_dataloaders": [data.loader(1, 12), data.loader(2, 20)]}


# Iterable data and loaders that change -----------------------------------------------------------


class Stream(IterableDataset[Any]):
    """Samples one by one; several workers share them."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        samples = CaseData().dataset(1, 21)
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(start, 21, step):
            yield samples[index]


class SizedStream(Stream):
    """Knows how many samples it has."""

    def __len__(self) -> int:
        return 21


def stream(kind: type[Stream], **options: Any) -> Callable[[], dict[str, Any]]:
    """Training and validation on a stream."""
    return lambda: {
        "train_dataloaders": DataLoader(kind(), batch_size=8, **options),
        "val_dataloaders": DataLoader(kind(), batch_size=5),
    }


class GrowingData(lp.LightningDataModule):
    """Every epoch's loader is larger than the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return CaseData(batch_size=4).loader(1, 4 + 4 * self.asked)

    def val_dataloader(self) -> Any:
        return CaseData(batch_size=4).loader(2, 7)


class TransferModule(CaseModule):
    """Changes batches before and after they are moved."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, *batch[1:]]

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return [item.to(device) for item in batch]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 1, batch[1]


class TransferData(GrowingData):
    """The same from the data module."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, *batch[1:]]

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return [item.to(device) for item in batch]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 1, batch[1]


# Ending, resuming, writing -----------------------------------------------------------------------


class Stop(lp.Callback):
    """Ends the training after a number of steps, from a callback."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self.step


class StoppingModule(CaseModule):
    """Ends the epoch and the training from its own hook."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 1 and batch_idx == 2 else None


def resume_inside_an_epoch(bench: Bench) -> None:
    """Stops after five steps of four per epoch, resumes with another Trainer and a new module."""
    saving = ModelCheckpoint(bench.folder + "/saved", every_n_train_steps=1, save_top_k=-1)
    saving.CHECKPOINT_NAME_LAST = "last"
    bench.new_trainer(max_steps=6, enable_checkpointing=True, callbacks=[saving])
    bench.fit()
    path = f"{bench.folder}/saved/epoch=1-step=5.ckpt"
    bench.module = bench.case.module().double()
    bench.new_trainer(max_epochs=3)
    bench.fit(ckpt_path=path)


def fit_twice(bench: Bench) -> None:
    """One Trainer goes on where it was; then another trains the same module."""
    bench.fit()
    bench.trainer.fit_loop.max_epochs = 3
    bench.fit()
    bench.new_trainer(max_epochs=1)
    bench.fit()


class Writer(BasePredictionWriter):
    """Keeps what it is given."""

    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        prediction, indices, _, *numbers = args
        self.written.append((prediction, indices, numbers))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.written.append(args)


def write(interval: str, *, return_predictions: bool = True) -> Callable[[Bench], None]:
    """Predicts with a writer."""

    def script(bench: Bench) -> None:
        writer = Writer(interval)
        bench.trainer.callbacks.append(writer)  # type: ignore[attr-defined]
        bench.predict(return_predictions=return_predictions)
        bench.on_rank_0["written"] = writer.written

    return script


CASES = [
    counted("fit"),
    counted("one Trainer for all", script=calls("validate", "fit", "validate", "test", "predict")),
    counted("fit twice", script=fit_twice),
    counted(
        "limits by number",
        {
            "limit_train_batches": 3,
            "limit_val_batches": 2,
            "limit_test_batches": 1,
            "limit_predict_batches": 2,
        },
        script=calls("fit", "test", "predict"),
    ),
    counted(
        "limits by fraction",
        {
            "limit_train_batches": 0.5,
            "limit_val_batches": 0.7,
            "limit_test_batches": 0.4,
            "limit_predict_batches": 0.4,
        },
        script=calls("fit", "test", "predict"),
    ),
    counted("no validation by limit", {"limit_val_batches": 0}),
    counted("overfit batches", {"overfit_batches": 2}),
    counted("profiler", {"profiler": "simple"}),
    counted("fast run", {"fast_dev_run": True}, script=calls("fit", "test", "predict")),
    counted("fast run of two batches", {"fast_dev_run": 2}),
    counted("max steps", {"max_steps": 6, "max_epochs": -1}),
    counted("no time left", {"max_time": {"seconds": 0}, "min_epochs": 1}),
    counted("validation every second batch", {"val_check_interval": 2}),
    counted("validation every half epoch", {"val_check_interval": 0.5}),
    counted("validation across epochs", {"val_check_interval": 3, "check_val_every_n_epoch": None}),
    counted("validation every second epoch", {"check_val_every_n_epoch": 2, "max_epochs": 3}),
    counted("whole sanity check", {"num_sanity_val_steps": -1}),
    counted("no sanity check", {"num_sanity_val_steps": 0}),
    counted("accumulation", {"accumulate_grad_batches": 3}),
    Case("stop by a callback", {"max_epochs": 5}, callbacks=lambda: [Counts(), Stop(5)]),
    Case(
        "stop not before min_epochs",
        {"max_epochs": 5, "min_epochs": 3},
        callbacks=lambda: [Counts(), Stop(5)],
    ),
    counted("skip the rest of an epoch", module=StoppingModule, trainer={"max_epochs": 3}),
    counted(
        "several loaders",
        module=ManyLoadersModule,
        data=many_loaders,
        script=calls("fit", "validate", "test", "predict"),
    ),
    *(
        counted(f"combined loaders, {mode}", module=CombinedModule, data=combined(mode))
        for mode in ("min_size", "max_size", "max_size_cycle")
    ),
    counted("a list of loaders", module=CombinedModule, data=plain_collection),
    counted(
        "loaders in sequence",
        module=ManyLoadersModule,
        data=in_sequence,
        script=calls("fit", "validate", "predict"),
    ),
    counted("stream", data=stream(Stream)),
    counted("stream of known length", data=stream(SizedStream)),
    counted(
        "stream with limits",
        {"limit_train_batches": 2, "limit_val_batches": 1, "val_check_interval": 1},
        data=stream(Stream),
    ),
    counted(
        "loaders that are made anew",
        {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
        data=lambda: {"datamodule": GrowingData()},
    ),
    counted("transfer hooks", module=TransferModule, script=calls("fit", "test", "predict")),
    counted(
        "transfer hooks of the data module",
        data=lambda: {"datamodule": TransferData()},
        script=calls("fit", "validate"),
    ),
    Case("resume inside an epoch", script=resume_inside_an_epoch),
    Case("predictions written by batch", script=write("batch")),
    Case("predictions written by epoch", script=write("epoch", return_predictions=False)),
    Case(
        "predictions written, several loaders",
        module=ManyLoadersModule,
        data=many_loaders,
        script=write("batch_and_epoch"),
    ),
]
