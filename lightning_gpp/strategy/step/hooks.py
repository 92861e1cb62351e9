"""Runs hooks of user code on the rank that has what they look at.

Those of the LightningModule that look at data or results run on rank 0; the others wait for the
hook's logs and answer, and log the same. A user who collects outputs in ``validation_step`` and
averages them in ``on_validation_epoch_end`` would otherwise find an empty list on every rank but
rank 0. Hooks that see neither, and those of callbacks, run on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
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


class LedHooks(ExitStack):
    """Replaces the hooks of a module, its data module and callbacks by relays.

    When this is closed, they are as the user wrote them; it may be installed again.

    Args:
        session: of this rank.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def install(self) -> None:
        """Puts the relays in place."""
        session, run = self._session, self._session.run
        is_leader = run.control.is_leader
        for name in LEADER_HOOKS:
            self._put(run.module, name, self._led)
        for name in _ON_EVERY_RANK:
            self._put(run.module, name, self._aside)
        if is_leader and not run.module.automatic_optimization:
            self.enter_context(session.manual.relaying())
        name = "on_before_batch_transfer"
        self._put(run.module, name, self._before_transfer, always=not is_leader)
        if (data := getattr(run.module.trainer, "datamodule", None)) is not None:
            self._put(data, name, self._before_transfer)
        for callback in run.module.trainer.callbacks:  # type: ignore[attr-defined]
            is_ours = type(callback).__module__.startswith(("lightning.", "lightning_gpp."))
            if is_ours or isinstance(callback, _OF_PARTS):
                continue
            for name in dir(pl.Callback):
                if name.startswith("on_") and name.endswith(("_start", "_end", "_step")):
                    self._put(callback, name, self._aside, pl.Callback)

    def _put(
        self, owner: Any, name: str, relay: _Hook, *parent: type, always: bool = False
    ) -> None:
        if not always and not is_overridden(name, owner, *parent):
            return
        hook = getattr(owner, name)

        @functools.wraps(hook)  # a function, which a copy of its owner has in common with it
        def relayed(*args: Any, **kwargs: Any) -> Any:
            return relay(name, hook, *args, **kwargs)

        self.enter_context(instance_attribute(owner, name, relayed))

    def _led(self, name: str, hook: _Hook, /, *args: Any, **kwargs: Any) -> Any:
        """All ranks return what the hook returns on rank 0."""
        session = self._session
        with session.run.failures.guard():
            if not session.run.control.is_leader:
                return session.follower.hook(name)
            with session.asides.reading(name):
                return session.forward.hook(name, hook, args, kwargs)

    def _aside(self, name: str, hook: _Hook, /, *args: Any, **kwargs: Any) -> Any:
        with self._session.asides.around(name):
            return hook(*args, **kwargs)

    def _before_transfer(
        self, name: str, hook: _Hook, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(batch, PlacedBatch | RemoteBatch):
            return batch
        run = self._session.run
        with run.alone(name) if run.control.is_leader else nullcontext():
            return hook(batch, *args, **kwargs)
