"""Callbacks and hooks call the model and read its weights outside of steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as lp
import torch
from torch import Tensor

from conformance.case import Bench, Case
from conformance.modules import CaseData, CaseModule


def samples(count: int) -> Any:
    """The inputs of a few samples, which no step has seen."""
    inputs, *_ = next(iter(CaseData().loader(7, count)))
    return inputs


class Aside(lp.Callback):
    """Notes a number in hooks.

    Args:
        number: what it notes of the module.
        hooks: their names.
        is_alone: whether on rank 0 only.
    """

    def __init__(
        self, number: Callable[[Any], Any], hooks: tuple[str, ...], is_alone: bool = False
    ) -> None:
        self.record: dict[str, float] = {}
        self.seen: list[float] = []
        self._number = number
        for hook in hooks:
            setattr(self, hook, lambda *args, hook=hook: self._note(hook, is_alone, *args))

    def _note(self, hook: str, is_alone: bool, trainer: Any, module: Any, *_: Any) -> None:
        if is_alone and not trainer.is_global_zero:
            return
        number = float(self._number(module))
        self.seen.append(number)
        if not is_alone:
            self.record[f"{hook} {len(self.record)}"] = number


def fits(bench: Bench) -> None:
    """Trains and validates; what callbacks saw is compared, too."""
    bench.fit()
    bench.validate()
    for callback in bench.trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Aside):
            assert callback.seen or not bench.trainer.is_global_zero, "the hook was called"
            bench.on_rank_0["seen"] = list(callback.seen)


@torch.no_grad()
def output(module: Any, count: int = 5) -> Tensor:
    return module(samples(count).to(module.device)).square().sum()


def norm(module: Any) -> Tensor:
    return torch.stack([parameter.detach().norm() for parameter in module.parameters()]).norm()


def total(module: Any) -> Tensor:
    return sum(value.double().abs().sum() for value in module.state_dict().values())


def both(module: Any) -> Tensor:
    return output(module, 3) * norm(module) + output(module)


class AsidesModule(CaseModule):
    """Calls itself and reads its weights in hooks of its own."""

    def on_validation_start(self) -> None:
        self.began = float(both(self))

    def on_train_epoch_end(self) -> None:
        self.log("ended", float(both(self)))

    def on_validation_end(self) -> None:
        assert math.isclose(self.began, float(both(self)), rel_tol=1e-9)


EPOCHS = ("on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end", "on_train_end")
BATCHES = ("on_train_batch_end", "on_validation_batch_start")


def seen(name: str, number: Callable[[Any], Any], hooks: tuple[str, ...], **options: Any) -> Case:
    """A case with one such callback."""
    is_alone = options.pop("is_alone", False)
    callbacks = {"callbacks": lambda: [Aside(number, hooks, is_alone)]}
    return Case(name, **{"module": CaseModule, "script": fits} | callbacks | options)


CASES = (
    seen("the model is called around epochs", output, EPOCHS),
    seen("the model is called on rank 0", output, EPOCHS + BATCHES, is_alone=True),
    seen("the model is called around batches", output, BATCHES),
    seen("all weights are read", norm, EPOCHS),
    seen("the state dict is read", total, EPOCHS),
    seen("all weights are read on rank 0", norm, EPOCHS, is_alone=True),
    seen("both on all ranks", both, EPOCHS),
    Case("both in hooks of the module", module=AsidesModule, script=fits),
)
