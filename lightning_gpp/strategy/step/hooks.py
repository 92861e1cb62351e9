"""Hooks of the LightningModule that look at data or results run where those are: on rank 0.

The others wait for the hook's logs and answer, and log the same. A user who collects outputs in
``validation_step`` and averages them in ``on_validation_epoch_end`` would otherwise find an empty
list on every rank but rank 0. Hooks that see neither run on every rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.strategy.lightning_private import is_overridden
from lightning_gpp.strategy.session import Session
from lightning_gpp.strategy.step.asides import ON_EVERY_RANK, as_aside
from lightning_gpp.strategy.step.loaders import PlacedBatch, RemoteBatch

LEADER_HOOKS = tuple(
    f"on_{stage}_{when}"
    for stage in ("train", "validation", "test", "predict")
    for when in ("batch_start", "batch_end", "epoch_end")
)


_Hook = Callable[..., Any]


class HookRelay:
    """Puts relays in the place of a module's (or data module's) hooks, as instance attributes.

    Args:
        session: of this rank.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._module = session.run.module
        self._installed = contextlib.ExitStack()

    def install(self) -> None:
        """Puts the relays in place."""
        for name in LEADER_HOOKS:
            if is_overridden(name, self._module):
                self._put(self._module, name, functools.partial(self._relay, name))
        for name in ON_EVERY_RANK:
            if is_overridden(name, self._module):
                aside = functools.partial(as_aside, name, asides=self._session.asides)
                self._put(self._module, name, aside)
        manual = self._session.manual
        if manual is not None and self._session.run.control.is_leader:
            manual.install()
        name = "on_before_batch_transfer"
        is_leader = self._session.run.control.is_leader
        data = getattr(self._module.trainer, "datamodule", None)
        for owner in (self._module, data):
            is_there = owner is self._module and not is_leader
            if is_there or (owner is not None and is_overridden(name, owner)):
                relay = functools.partial(self._led, name) if is_leader else _skip_remote
                self._put(owner, name, relay)

    def remove(self) -> None:
        """Takes the relays away; the module is as the user wrote it."""
        self._installed.close()
        if self._session.manual is not None:
            self._session.manual.remove()

    def _put(self, owner: object, name: str, relay: Callable[[_Hook], _Hook]) -> None:
        hook = getattr(owner, name)
        relayed = functools.wraps(hook)(relay(hook))  # with its signature
        self._installed.enter_context(instance_attribute(owner, name, relayed))

    def _relay(self, name: str, hook: _Hook) -> _Hook:
        def relayed(*args: Any, **kwargs: Any) -> Any:
            with self._session.run.failures.guard():
                return self._session.hook(name, hook, args, kwargs)

        return relayed

    def _led(self, name: str, hook: _Hook) -> _Hook:
        def led(*args: Any, **kwargs: Any) -> Any:
            if isinstance(args[0], PlacedBatch):
                return args[0]
            with self._session.run.alone(name):
                return hook(*args, **kwargs)

        return led


def _skip_remote(hook: _Hook) -> _Hook:
    def skipping(batch: Any, dataloader_idx: int) -> Any:
        return batch if isinstance(batch, RemoteBatch) else hook(batch, dataloader_idx)

    return skipping
