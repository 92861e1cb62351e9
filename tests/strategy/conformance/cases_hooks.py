"""Hooks are called as often and in the order that Lightning calls them on one device.

On ranks other than 0 the expectation is that sequence without what runs on rank 0 only: steps,
transfers of batches, and the module's hooks around batches and at the end of epochs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch

from conformance import hooks
from conformance.case import Bench, Case
from conformance.modules import CaseData, CaseModule


def recorded(*calls: str) -> Callable[[Bench], None]:
    """Makes calls on the Trainer and notes the sequence of hooks."""

    def script(bench: Bench) -> None:
        sequence = bench.module.sequence
        if "datamodule" in bench.data:
            bench.data["datamodule"] = hooks.RecordedData(sequence)
        callback = hooks.RecordedCallback()
        callback.sequence = sequence
        bench.trainer.callbacks.append(callback)
        for call in calls:
            getattr(bench, call)()
        is_cut = bench.schedule == "1f1b"
        bench.on_rank_0["hooks"] = hooks.as_whole_batches(sequence) if is_cut else list(sequence)
        # What rank 0 alone runs is taken away where it runs; on other ranks it must not appear.
        elsewhere = hooks.on_other_ranks(sequence)
        bench.everywhere["hooks"] = elsewhere if bench.trainer.is_global_zero else list(sequence)

    return script


def several_loaders() -> dict[str, Any]:
    data = CaseData()
    return {
        "train_dataloaders": data.loader(1, 20),
        "val_dataloaders": [data.loader(2, 10), data.loader(3, 17)],
        "predict_dataloaders": {"a": data.loader(4, 9), "b": data.loader(5, 3)},
    }


class ManyLoadersModule(hooks.HookModule):
    """Its steps take the number of the loader."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        super().validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> torch.Tensor:
        return super().predict_step(batch, batch_idx)


class CountingModule(CaseModule):
    """Its step, on rank 0, counts in dicts what sets the learning rate on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.last = {"batch": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counts["steps"] += 1
        self.sums[f"half {batch_idx % 2}"] += float(batch[0].square().mean())
        self.last = {} if batch_idx == 1 else {"batch": batch_idx, "size": len(batch[0])}
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        numbers = [*self.counts.values(), *self.sums.values(), *self.last.values()]
        optimizer.param_groups[0]["lr"] = 0.1 / (1.0 + sum(numbers))


RecordedMany = hooks.recorded(ManyLoadersModule, "module", hooks.MODULE_HOOKS)

CASES = [
    Case("fit", module=hooks.RecordedModule, script=recorded("fit")),
    Case(
        "fit with checkpoints",
        {"enable_checkpointing": True, "max_epochs": 1},
        hooks.RecordedModule,
        script=recorded("fit"),
    ),
    Case(
        "validate, test, predict",
        module=hooks.RecordedModule,
        script=recorded("validate", "test", "predict"),
    ),
    Case(
        "datamodule",
        module=hooks.RecordedWithData,
        data=lambda: {"datamodule": None},
        script=recorded("fit", "validate", "test", "predict"),
    ),
    Case(
        "accumulation, clipping and validation inside of the epoch",
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "val_check_interval": 2},
        hooks.RecordedModule,
        script=recorded("fit"),
    ),
    Case("skipped batches", module=hooks.RecordedSkippingModule, script=recorded("fit")),
    Case("counts in dicts", module=CountingModule, only_whole=True),
    Case(
        "several loaders",
        module=RecordedMany,
        data=several_loaders,
        script=recorded("fit", "validate", "predict"),
    ),
]
