"""Hooks of user code run where what they look at is.

Those of the LightningModule that look at data or results run on rank 0; the others wait for the
hook's logs and answer, and log the same. A user who collects outputs in ``validation_step`` and
averages them in ``on_validation_epoch_end`` would otherwise find an empty list on every rank but
rank 0. Hooks that see neither, and those of callbacks, run on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging

from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.strategy.lightning_private import is_overridden
from lightning_gpp.strategy.session import Session
from lightning_gpp.strategy.step.loaders import PlacedBatch, RemoteBatch

_STAGES = ("validation", "test", "predict")
LEADER_HOOKS = tuple(
    f"on_{stage}_{when}"
    for stage in ("train", *_STAGES)
    for when in ("batch_start", "batch_end", "epoch_end")
)
_ON_EVERY_RANK = (
    *(f"on_{stage}_{when}" for stage in ("fit", "train", *_STAGES) for when in ("start", "end")),
    *(f"on_{stage}_epoch_start" for stage in ("train", *_STAGES)),
    *("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
)
_OF_PARTS = (BaseFinetuning, StochasticWeightAveraging, WeightAveraging)
"""Callbacks that work on what each rank holds."""

_Hook = Callable[..., Any]


@contextmanager
def led_hooks(trainer: pl.Trainer, session: Session) -> Iterator[None]:
    """In this hooks are relayed; afterwards modules and callbacks are as the user wrote them.

    Args:
        trainer: whose module, data module and callbacks.
        session: of this rank.
    """
    run = session.run
    is_leader = run.control.is_leader

    def led(name: str, hook: _Hook, *args: Any, **kwargs: Any) -> Any:
        with run.failures.guard():
            return session.hook(name, hook, args, kwargs)

    def aside(name: str, hook: _Hook, *args: Any, **kwargs: Any) -> Any:
        with session.asides.around(name):
            return hook(*args, **kwargs)

    def before_transfer(name: str, hook: _Hook, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(batch, PlacedBatch | RemoteBatch):
            return batch
        with run.alone(name) if is_leader else ExitStack():
            return hook(batch, *args, **kwargs)

    with ExitStack() as stack:

        def put(owner: Any, name: str, relay: _Hook, *parent: type, always: bool = False) -> None:
            if always or is_overridden(name, owner, *parent):
                hook = getattr(owner, name)
                relayed = functools.wraps(hook)(functools.partial(relay, name, hook))
                stack.enter_context(instance_attribute(owner, name, relayed))

        for name in LEADER_HOOKS:
            put(run.module, name, led)
        for name in _ON_EVERY_RANK:
            put(run.module, name, aside)
        if session.manual is not None and is_leader:
            stack.enter_context(session.manual.relaying())
        name = "on_before_batch_transfer"
        data = getattr(trainer, "datamodule", None)
        put(run.module, name, before_transfer, always=not is_leader)
        if data is not None:
            put(data, name, before_transfer)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            is_ours = type(callback).__module__.startswith(("lightning.", "lightning_gpp."))
            if is_ours or isinstance(callback, _OF_PARTS):
                continue
            for name in dir(pl.Callback):
                if name.startswith("on_") and name.endswith(("_start", "_end", "_step")):
                    put(callback, name, aside, pl.Callback)
        yield
