"""Lightning's own callbacks, loggers and learning-rate schedulers; the Tuner."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import callbacks as pc
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.model_summary import summarize
from torch import nn
from torch.optim import lr_scheduler
from tqdm import tqdm

from conformance.case import Bench, Case
from conformance.modules import CaseModule

# Loggers -----------------------------------------------------------------------------------------


class WithSettings(CaseModule):
    """Has hyperparameters, and logs a number for them."""

    def __init__(self, width: int = 5, name: str = "towers") -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_fit_start(self) -> None:
        for logger in self.loggers:
            logger.log_hyperparams(self.hparams, {"hp_metric": 0.5})  # type: ignore[call-arg]


def files(folder: Path) -> list[str]:
    """Every file below a folder, without what is different in the name of each run."""
    found = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(re.sub(r"tfevents.*", "tfevents", name) for name in found)


def tensorboard_files(bench: Bench) -> None:
    """All numbers and hyperparameters in the event files, and how many files there are."""
    bench.new_trainer(logger=TensorBoardLogger(bench.folder, "board", default_hp_metric=False))
    bench.fit()
    bench.validate()
    folder = Path(bench.folder, "board", "version_0")
    bench.everywhere["folder"] = str(Path(str(bench.trainer.log_dir)).relative_to(bench.folder))
    if bench.trainer.is_global_zero:
        bench.on_rank_0["files"] = files(Path(bench.folder))
        bench.on_rank_0["hparams"] = yaml.safe_load((folder / "hparams.yaml").read_text())
        bench.on_rank_0["events"] = events(folder)


def events(folder: Path) -> dict[str, Any]:
    """Steps and values by name, and the names of the plug-ins' data."""
    # Slow to import, and only rank 0 needs it.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    tags = accumulator.Tags()
    scalars = {
        name: [(event.step, event.value) for event in accumulator.Scalars(name)]
        for name in tags["scalars"]
    }
    plugins = sorted(accumulator.summary_metadata)
    return {"scalars": scalars, "plugins": plugins}


def default_logger(bench: Bench) -> None:
    """``logger=True`` and the default checkpoint, then ``logger=False``."""
    for enabled in (True, False):
        bench.new_trainer(logger=enabled, enable_checkpointing=enabled)
        bench.fit()
        logger = bench.trainer.logger
        bench.everywhere[f"logger={enabled}"] = [type(logger).__name__, len(bench.trainer.loggers)]
    if bench.trainer.is_global_zero:
        bench.on_rank_0["files"] = files(Path(bench.folder))


# Checkpoints, stopping, learning rates -----------------------------------------------------------


def checkpoints(**options: Any) -> Callable[[Bench], None]:
    """Trains with one ``ModelCheckpoint``; notes its state and its files."""

    def script(bench: Bench) -> None:
        folder = Path(bench.folder, "kept")
        checkpoint = pc.ModelCheckpoint(folder, **options)
        bench.new_trainer(callbacks=[checkpoint], enable_checkpointing=True)
        bench.fit()
        score = checkpoint.best_model_score
        bench.everywhere["best"] = {
            "path": Path(checkpoint.best_model_path).name,
            "last": Path(checkpoint.last_model_path).name,
            "score": None if score is None else float(score),
            "kept": {Path(k).name: float(v) for k, v in checkpoint.best_k_models.items()},
        }
        if bench.trainer.is_global_zero:
            for path in sorted(folder.iterdir()):
                content = torch.load(path, weights_only=True)
                bench.on_rank_0[path.name] = [content["state_dict"], content["global_step"]]

    return script


class Rates(pc.LearningRateMonitor):
    """Notes what the monitor saw, and the rates after every batch."""

    def __init__(self, interval: Any) -> None:
        super().__init__(interval, log_momentum=True)
        self.record: dict[str, Any] = {"rates": []}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.record["rates"].append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.record["seen"] = {k: [float(v) for v in values] for k, values in self.lrs.items()}


class Scheduled(CaseModule):
    """With a scheduler and how Lightning steps it."""

    def __init__(self, make: Callable[[Any], Any], **config: Any) -> None:
        super().__init__()
        self.make, self.config = make, config

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.4, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make(optimizer), **self.config},
        }


def plateau(optimizer: Any) -> Any:
    """Falls as soon as the metric does not."""
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)


def one_cycle(optimizer: Any) -> Any:
    """Rate and momentum change every step."""
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=12)


def scheduled(name: str, make: Callable[[Any], Any], **config: Any) -> Case:
    """A case of one scheduler."""
    interval = config["interval"]
    return Case(
        name,
        module=lambda: Scheduled(make, **config),
        callbacks=lambda: [Rates(interval)],
        trainer={"max_epochs": 3},
    )


@contextmanager
def unseen() -> Iterator[io.StringIO]:
    """Catches what bars and tables write; tqdm's monitor thread would outlive the case."""
    interval, tqdm.monitor_interval = tqdm.monitor_interval, 0
    shown = io.StringIO()
    try:
        with redirect_stdout(shown), redirect_stderr(shown):
            yield shown
    finally:
        tqdm.monitor_interval = interval


# What is shown -----------------------------------------------------------------------------------


class WithExample(CaseModule):
    """With an input for the summary, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 5, dtype=torch.float64)
        self.left.requires_grad_(False)


class Summary(pc.ModelSummary):
    """Notes the numbers it shows, which are rank 0's."""

    def __init__(self, max_depth: int) -> None:
        super().__init__(max_depth)
        self.tables: list[Any] = []

    def summarize(self, summary_data: Any, *numbers: Any, **options: Any) -> None:  # type: ignore[override]
        self.tables.append([summary_data, numbers])
        super().summarize(summary_data, *numbers, **options)


class RichSummary(pc.RichModelSummary, Summary):
    """The same table by rich."""


def summaries(bench: Bench) -> None:
    """The tables of both summaries at fit, validate and test, and one made by hand after."""
    kinds = [Summary(max_depth=2), RichSummary(max_depth=2)]
    with unseen():
        for kind in kinds:
            bench.new_trainer(callbacks=[kind], enable_model_summary=True)
            bench.fit()
            bench.validate()
            bench.test()
            if bench.trainer.is_global_zero:
                bench.on_rank_0[type(kind).__name__] = kind.tables
    table = summarize(bench.module, max_depth=2)
    bench.everywhere["by hand"] = [str(table), table.total_parameters, table.trainable_parameters]


class RichBar(pc.RichProgressBar):
    """Notes the metrics beside the bar."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=1)
        self.record: dict[str, Any] = {"rows": []}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        self.record["rows"].append(self.get_metrics(trainer, pl_module))


class TqdmBar(pc.TQDMProgressBar):
    """Notes the metrics beside the bar, and how far it came (there is one on rank 0)."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=1)
        self.record: dict[str, Any] = {"rows": []}
        self.positions: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        self.record["rows"].append(self.get_metrics(trainer, pl_module))
        self.positions.append(self.train_progress_bar.n)


class ShownLoss(CaseModule):
    """Shows the loss in the bar."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss


def bars(bench: Bench) -> None:
    """Training, validation, test and prediction under both bars."""
    for bar in (RichBar(), TqdmBar()):
        bench.new_trainer(callbacks=[bar], enable_progress_bar=True)
        with unseen():
            bench.fit()
            bench.validate(verbose=True)
            bench.test()
            bench.predict()
        if isinstance(bar, TqdmBar):
            bench.on_rank_0["positions"] = bar.positions


# Others ------------------------------------------------------------------------------------------


class Calls:
    """Counts the calls of hooks made of functions."""

    def __init__(self) -> None:
        self.count = {"batches": 0, "epochs": 0}

    def batch(self, *_: Any) -> None:
        self.count["batches"] += 1

    def epoch(self, *_: Any) -> None:
        self.count["epochs"] += 1


def small_callbacks(bench: Bench) -> None:
    """Timer, functions as hooks, a growing accumulation, stopping on a validation metric."""
    calls = Calls()
    timer = pc.Timer("00:01:00:00")
    functions = pc.LambdaCallback(
        on_train_batch_end=calls.batch, on_validation_epoch_end=calls.epoch
    )
    growing = pc.GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})
    stopping = pc.EarlyStopping("val_loss", min_delta=10.0, patience=2)
    callbacks = [timer, functions, growing, stopping]
    bench.new_trainer(callbacks=callbacks, max_epochs=6)
    bench.fit()
    bench.everywhere["calls"] = calls.count
    bench.everywhere["timed"] = timer.time_elapsed("train") > 0
    bench.everywhere["stopped"] = [stopping.stopped_epoch, float(stopping.best_score)]


def out_of_time(bench: Bench) -> None:
    """The timer ends the training after the first step."""
    bench.new_trainer(callbacks=[pc.Timer({"microseconds": 1}, interval="step")])
    bench.fit()


def first(batch: Any) -> int:
    """Samples of a batch."""
    return len(batch[0])


def statistics(bench: Bench) -> None:
    """Names and counts of what throughput and device statistics log; times differ."""
    logger = CSVLogger(bench.folder, "numbers")
    callbacks = [
        pc.ThroughputMonitor(first, lambda batch: batch[0].numel(), window_size=3),
        pc.DeviceStatsMonitor(cpu_stats=True),
    ]
    bench.new_trainer(callbacks=callbacks, logger=logger)
    bench.fit()
    bench.test()
    if bench.trainer.is_global_zero:
        with Path(logger.log_dir, "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        bench.on_rank_0["names"] = sorted(rows[0])
        counts = ("samples", "lengths", "batches")
        bench.on_rank_0["counts"] = [
            [row.get(f"{stage}/{name}") for name in counts for stage in ("train", "test")]
            for row in rows
        ]


class Tuned(CaseModule):
    """Its rate can be found."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr)


def find_rate(bench: Bench) -> None:
    """The Tuner's search, and the training that follows."""
    bench.new_trainer(max_epochs=10)
    with unseen():
        found = Tuner(bench.trainer).lr_find(
            bench.module, bench.data["train_dataloaders"], num_training=40
        )
        assert found is not None and isinstance(bench.module, Tuned)
        bench.everywhere["found"] = [found.results, bench.module.lr]
        bench.fit()


class Backbone(CaseModule):
    """Trains its head first; the towers are frozen until a callback adds them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleList([self.left, self.right])

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=0.05)


def finetune(bench: Bench) -> None:
    """Towers join in the third epoch; the checkpoint is as from one device and resumes."""
    path = Path(bench.folder, "finetuned.ckpt")
    for epochs, source in ((4, None), (6, path)):
        bench.new_trainer(max_epochs=epochs, callbacks=[pc.BackboneFinetuning(2)])
        bench.fit(ckpt_path=source)
        bench.trainer.save_checkpoint(path)
        if bench.trainer.is_global_zero:
            saved = torch.load(path, weights_only=True)
            bench.on_rank_0[f"{epochs} epochs"] = [saved["optimizer_states"], saved["callbacks"]]


def stepwise(**options: Any) -> Callable[[Bench], None]:
    """Checkpoints inside an epoch."""
    return checkpoints(every_n_train_steps=3, **options)


CASES = [
    Case("TensorBoardLogger", module=WithSettings, script=tensorboard_files),
    Case("logger=True, logger=False", script=default_logger),
    Case("checkpoint every 3 steps", script=stepwise(save_top_k=-1)),
    Case(
        "checkpoint of the best steps",
        script=stepwise(
            filename="{step}-{train_loss_step:.3f}",
            monitor="train_loss_step",
            save_top_k=2,
            save_last=True,
        ),
    ),
    Case(
        "save_on_train_epoch_end",
        script=checkpoints(
            save_on_train_epoch_end=True,
            monitor="train_loss_epoch",
            save_weights_only=True,
        ),
    ),
    scheduled("ReduceLROnPlateau per epoch", plateau, interval="epoch", monitor="val_loss"),
    scheduled(
        "ReduceLROnPlateau per step",
        plateau,
        interval="step",
        frequency=2,
        monitor="train_loss_step",
    ),
    scheduled("OneCycleLR per step", one_cycle, interval="step"),
    Case("model summaries", module=WithExample, script=summaries),
    Case("progress bars", module=ShownLoss, script=bars),
    Case("timer, functions, accumulation, stopping", script=small_callbacks),
    Case("out of time", script=out_of_time),
    Case("throughput and device statistics", script=statistics),
    Case("lr_find", module=Tuned, script=find_rate),
    Case("BackboneFinetuning", module=Backbone, script=finetune),
]
