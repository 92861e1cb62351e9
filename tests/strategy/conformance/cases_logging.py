"""What is logged in training: torchmetrics objects, from callbacks, into Lightning's loggers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import torch
import torchmetrics as tm
from helpers.models import DataSpec, ExportableModel
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)
from torchmetrics.wrappers import MinMaxMetric, Running

from conformance.case import Bench, Case

DATA = DataSpec(num_samples=21, num_inputs=2)
"""The last batch is smaller."""


def data(samples: DataSpec = DATA) -> dict[str, Any]:
    return {"train_dataloaders": samples.loader(), "val_dataloaders": samples.loader()}


class Metrics(lp.Callback):
    """Notes all three kinds of metrics after every batch, epoch and validation."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {"rows": []}

    def on_train_batch_end(self, trainer: lp.Trainer, *_: Any) -> None:
        self.note(trainer)

    def on_validation_end(self, trainer: lp.Trainer, *_: Any) -> None:
        self.note(trainer)

    def on_fit_end(self, trainer: lp.Trainer, *_: Any) -> None:
        self.note(trainer)

    def note(self, trainer: lp.Trainer) -> None:
        kinds = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        row = [{name: float(value) for name, value in kind.items()} for kind in kinds]
        self.record["rows"].append(row)


class Sgd(ExportableModel):
    """Two towers without a scheduler."""

    def __init__(self) -> None:
        super().__init__(optimizer_name="sgd", scheduler=None)


class MetricObjects(Sgd):
    """Logs metrics by object, by value, from collections, wrappers and by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.f1 = MulticlassF1Score(3)
        self.by_value = MulticlassF1Score(3)
        self.by_hand = MulticlassF1Score(3)
        self.auc = MulticlassAUROC(3)
        self.whole_state = tm.PearsonCorrCoef()
        self.mean_loss = tm.MeanMetric()
        self.window = Running(tm.MeanMetric(), 3)
        kinds = [MulticlassPrecision(3), MulticlassRecall(3)]
        self.collection = tm.MetricCollection(kinds, prefix="a/")
        self.updated = tm.MetricCollection([*kinds, MulticlassAUROC(3)], prefix="b/").clone()
        self.table = nn.ModuleDict({"mae": tm.MeanAbsoluteError()})
        self.rows = nn.ModuleList([tm.MeanSquaredError()])
        self.extremes = MinMaxMetric(tm.MeanAbsoluteError())
        self.on_cpu = BinaryAUROC(compute_on_cpu=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, (output,) = self.step_loss(batch)
        target = batch[1]
        classes = target.argmax(1)
        both = {"on_step": True, "on_epoch": True}
        self.f1(output, classes)
        self.log("f1", self.f1, **both)
        self.log("by_value", self.by_value(output, classes), prog_bar=True, **both)
        self.by_hand.update(output, classes)
        self.auc(output, classes)
        self.log("auc", self.auc, **both)
        self.whole_state(output[:, 0], target[:, 0])
        self.log("whole_state", self.whole_state, **both)
        self.mean_loss(loss)
        self.log("mean_loss", self.mean_loss, **both)
        self.window(loss)
        self.log("window", self.window, **both)
        self.log_dict(self.collection(output, classes))
        self.updated.update(output, classes)
        self.log_dict(self.updated, on_step=False, on_epoch=True)
        for name, metric in (("mae", self.table["mae"]), ("mse", self.rows[0])):
            metric(output, target)
            self.log(name, metric, **both)
        self.extremes.update(output, target)
        self.log_dict({f"extremes {k}": v for k, v in self.extremes.compute().items()})
        self.on_cpu(output[:, 0].sigmoid(), (target[:, 0] > 0).long())
        self.log("on_cpu", self.on_cpu, **both)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("by_hand", self.by_hand.compute())
        self.by_hand.reset()


class EpochMetrics(Sgd):
    """Metrics whose value is that of an epoch, which see their samples in whatever parts."""

    def __init__(self) -> None:
        super().__init__()
        self.f1 = MulticlassF1Score(3)
        self.auc = MulticlassAUROC(3)
        self.whole_state = tm.PearsonCorrCoef()
        self.by_hand = MulticlassF1Score(3)
        kinds = [MulticlassPrecision(3), MulticlassRecall(3)]
        self.collection = tm.MetricCollection(kinds, prefix="a/")
        self.table = nn.ModuleDict({"mae": tm.MeanAbsoluteError()})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, (output,) = self.step_loss(batch)
        target = batch[1]
        classes = target.argmax(1)
        by_epoch = {"on_step": False, "on_epoch": True}
        self.f1(output, classes)
        self.log("f1", self.f1, **by_epoch)
        self.auc.update(output.softmax(1), classes)  # else each update decides whether they are
        self.log("auc", self.auc, prog_bar=True, **by_epoch)
        self.whole_state(output[:, 0], target[:, 0])
        self.log("whole_state", self.whole_state, **by_epoch)
        self.by_hand.update(output, classes)
        self.collection(output, classes)
        self.log_dict(self.collection, **by_epoch)
        self.table["mae"](output, target)
        self.log("mae", self.table["mae"], **by_epoch)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("by_hand", self.by_hand.compute())
        self.by_hand.reset()


class ReadsMetric(Metrics):
    """Computes, on every rank, a metric that the module does not log."""

    def on_train_batch_end(self, trainer: lp.Trainer, *args: Any) -> None:
        module = trainer.lightning_module
        assert isinstance(module, MetricObjects | EpochMetrics)
        self.record["rows"].append(float(module.by_hand.compute()))


class EveryForm(Sgd):
    """``self.log`` in all its forms, in the step and in hooks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, (output,) = self.step_loss(batch)
        both: dict[str, Any] = {"on_step": True, "on_epoch": True}
        misses = (output - batch[1]).abs()
        self.log("step", loss, on_step=True, on_epoch=False, prog_bar=True)
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.log("both", loss, prog_bar=True, reduce_fx=torch.mean, **both)
        self.log("no logger", loss, logger=False, **both)
        self.log("worst", misses.max(), reduce_fx="max", **both)
        self.log("best", misses.min(), reduce_fx=min, **both)
        self.log("count", float(len(output)), reduce_fx=sum, **both)
        self.log("given size", loss, batch_size=len(output), **both)
        self.log("synced", loss, sync_dist=True, **both)
        self.log("rank zero", loss, rank_zero_only=True, **both)
        self.log("no index", loss, add_dataloader_idx=False, **both)
        self.log("graph", loss, enable_graph=True, **both)
        self.log("number", 3.5)
        self.log("flag", True)
        self.log_dict({"dict/a": loss, "dict/b": 2.0}, **both)
        return loss

    def on_train_epoch_start(self) -> None:
        self.log("epoch start", float(self.current_epoch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("samples", float(len(batch[1])), on_epoch=True, reduce_fx="sum")

    def on_train_epoch_end(self) -> None:
        self.log("epoch end", 2.0 * self.current_epoch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("rate", optimizer.param_groups[0]["lr"])

    def on_validation_epoch_end(self) -> None:
        self.log("validation end", 5.0, prog_bar=True)


class EveryKindOfNumber(Sgd):
    """Numbers that are no means over samples, whatever their ``reduce_fx``; rare ones; rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, (output,) = self.step_loss(batch)
        both: dict[str, Any] = {"on_step": True, "on_epoch": True}
        misses = (output - batch[1]).abs().detach()
        self.log("sum of means", loss, reduce_fx="sum", **both)
        self.log("worst mean", loss, reduce_fx="max", **both)
        self.log("best mean", loss, reduce_fx="min", **both)
        self.log("mean of sums", misses.sum(), **both)
        self.log("given size", misses.sum(), batch_size=len(output), **both)
        self.log_dict({"worst": misses.max(), "best": misses.min()}, **both)
        self.log_dict({"count": float(len(output)), "large": (misses > 1).sum()}, **both)
        self.log("never", (misses > 1e3).sum(), **both)
        self.log("first", output[0, 0], **both)
        self.log("last", output[-1, 0], **both)
        self.log("number", batch_idx + 0.1, **both)
        if batch_idx == 1:
            self.log("rare", misses.sum(), **both)
        if self.training:
            self.log("in training", loss, **both)
        assert self.logger is not None
        self.logger.log_metrics(
            {"row/loss": loss.item(), "row/sum": misses.sum()}, self.global_step
        )
        if batch_idx == 2:
            self.logger.log_metrics({"row/worst": misses.max().item(), "row/count": len(output)})
        return loss


class LogsFromCallback(Metrics):
    """``pl_module.log`` in hooks of a callback, on every rank."""

    def on_train_batch_end(self, trainer: lp.Trainer, *args: Any) -> None:
        trainer.lightning_module.log("batch", float(args[-1]), on_step=True, on_epoch=True)
        super().on_train_batch_end(trainer)

    def on_before_optimizer_step(self, trainer: lp.Trainer, pl_module: Any, opt: Any) -> None:
        pl_module.log("rate", opt.param_groups[0]["lr"])

    def on_validation_epoch_end(self, trainer: lp.Trainer, pl_module: Any) -> None:
        self.log("validated", 3.0)


def into_files(bench: Bench) -> None:
    """Two loggers; rank 0's files, read back."""
    loggers = [CSVLogger(bench.folder, name) for name in ("one", "two")]
    bench.new_trainer(logger=loggers)
    bench.fit()
    if bench.trainer.is_global_zero:
        for path in sorted(Path(bench.folder).rglob("*.csv")):
            with path.open() as file:
                rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
            bench.on_rank_0[str(path.relative_to(bench.folder))] = rows


def keep_checkpoints(bench: Bench) -> None:
    """The best two and the last, by name; what is best on every rank."""
    folder = Path(bench.folder, "kept")
    checkpoint = ModelCheckpoint(
        folder, "{epoch}-{val_loss:.3f}", monitor="val_loss", save_top_k=2, save_last=True
    )
    stopping = EarlyStopping("train_loss_epoch", min_delta=0.3, patience=1)
    callbacks = [checkpoint, stopping, LearningRateMonitor("step")]
    bench.new_trainer(callbacks=callbacks, enable_checkpointing=True, max_epochs=6)
    bench.fit()
    bench.everywhere["best"] = {
        "path": Path(checkpoint.best_model_path).name,
        "score": float(checkpoint.best_model_score),  # type: ignore[arg-type]
        "kept": {Path(k).name: float(v) for k, v in checkpoint.best_k_models.items()},
        "stopped": stopping.stopped_epoch,
    }
    if bench.trainer.is_global_zero:
        for path in sorted(folder.iterdir()):
            bench.on_rank_0[path.name] = torch.load(path, weights_only=True)["state_dict"]


CASES = [
    Case("every form", module=EveryForm, data=data, callbacks=lambda: [Metrics()]),
    Case(
        "every kind of number",
        module=EveryKindOfNumber,
        data=data,
        callbacks=lambda: [Metrics()],
        only_whole=True,
    ),
    Case(
        "every kind of number in batches of three",
        module=EveryKindOfNumber,
        data=lambda: data(DataSpec(num_samples=14, batch_size=3, num_inputs=2)),
        callbacks=lambda: [Metrics()],
        strategy={"num_microbatches": 2},
        only_whole=True,
    ),
    Case("from callbacks", module=Sgd, data=data, callbacks=lambda: [LogsFromCallback()]),
    Case(
        "torchmetrics objects",
        module=MetricObjects,
        data=data,
        callbacks=lambda: [Metrics()],
        tolerance=1e-5,
        only_whole=True,
    ),
    Case(
        "metrics read by callbacks",
        module=MetricObjects,
        data=data,
        callbacks=lambda: [ReadsMetric()],
        tolerance=1e-5,
        only_whole=True,
    ),
    Case(
        "torchmetrics objects by epoch",
        module=EpochMetrics,
        data=data,
        callbacks=lambda: [ReadsMetric()],
        tolerance=1e-5,
    ),
    Case("CSV files", module=Sgd, data=data, script=into_files),
    Case("checkpoints and stopping", module=Sgd, data=data, script=keep_checkpoints),
]
