"""Records the hooks of a LightningModule, its callbacks and its LightningDataModule in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as lp

from conformance.modules import CaseData, CaseModule
from lightning_gpp.strategy.step.hooks import LEADER_HOOKS

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
ONLY_ON_RANK_0 = frozenset((*LEADER_HOOKS, *STEPS))
"""What runs on rank 0 and nowhere else, by design, beside ``prepare_data`` and transfers."""

MODULE_HOOKS = (
    *(name for name in dir(lp.LightningModule) if name.startswith("on_") and name != "on_gpu"),
    *("setup", "teardown", "prepare_data", "configure_model", "configure_callbacks"),
    *("configure_optimizers", "configure_gradient_clipping", "backward", "optimizer_step"),
    *("optimizer_zero_grad", "lr_scheduler_step", "transfer_batch_to_device", *STEPS),
)
DATA_HOOKS = (
    *("prepare_data", "setup", "teardown", "state_dict", *TRANSFER_HOOKS),
    *(f"{kind}_dataloader" for kind in ("train", "val", "test", "predict")),
)
CALLBACK_HOOKS = (
    *(name for name in dir(lp.Callback) if name.startswith("on_")),
    *("setup", "teardown", "state_dict"),
)


def recorded(kind: type, owner: str, names: Sequence[str]) -> type:
    """A subclass that adds a line to ``self.sequence`` whenever one of these hooks is called."""

    def method(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            plain = [str(a) for a in (*args, *kwargs.values()) if isinstance(a, int | str)]
            self.sequence.append(f"{owner}.{name}({', '.join(plain)})")
            return getattr(super(subclass, self), name)(*args, **kwargs)

        return hook

    subclass = type(f"Recorded{kind.__name__}", (kind,), {name: method(name) for name in names})
    return subclass


class Calls(list[str]):
    """Of this rank: a plain list of the module is the same on all ranks, whoever filled it."""


class HookModule(CaseModule):
    """Every hook of this module is recorded; ``sequence`` is the record of all owners."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence: list[str] = Calls()


class SkippingModule(HookModule):
    """Skips the second batch, and the rest of the second epoch after its first."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == (1 if self.current_epoch == 0 else 0) else None


class HookData(lp.LightningDataModule):
    """Loaders of every kind from hooks."""

    def __init__(self, sequence: list[str]) -> None:
        super().__init__()
        self.sequence = sequence

    def train_dataloader(self) -> Any:
        return CaseData().loader(1, 20)

    def val_dataloader(self) -> Any:
        return CaseData().loader(2, 10)

    def test_dataloader(self) -> Any:
        return CaseData().loader(3, 10)

    def predict_dataloader(self) -> Any:
        return CaseData().loader(4, 10)


RecordedModule = recorded(HookModule, "module", MODULE_HOOKS)
RecordedSkippingModule = recorded(SkippingModule, "module", MODULE_HOOKS)
RecordedWithData = recorded(
    HookModule, "module", [name for name in MODULE_HOOKS if name not in DATA_HOOKS]
)
RecordedData = recorded(HookData, "data", DATA_HOOKS)
RecordedCallback = recorded(lp.Callback, "callback", CALLBACK_HOOKS)


def on_other_ranks(sequence: Sequence[str]) -> list[str]:
    """The part of a sequence that happens on ranks other than 0."""
    hidden = {f"module.{name}" for name in ONLY_ON_RANK_0}
    hidden |= {f"{owner}.{name}" for owner in ("module", "data") for name in TRANSFER_HOOKS}
    hidden |= {"module.prepare_data", "data.prepare_data"}
    return [line for line in sequence if line.partition("(")[0] not in hidden]


def as_whole_batches(sequence: Sequence[str]) -> list[str]:
    """A sequence in which the training steps of a batch's micro-batches count once."""
    return [
        line
        for before, line in zip(["", *sequence], sequence, strict=False)
        if not (line.startswith("module.training_step") and line == before)
    ]
