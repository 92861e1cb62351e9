"""Hooks of the LightningModule that look at data or results run where those are: on rank 0.

The others wait for the hook's logs and answer, and log the same. A user who collects outputs in
``validation_step`` and averages them in ``on_validation_epoch_end`` would otherwise find an empty
list on every rank but rank 0. Hooks that see neither run on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_gpp.strategy.control import Control
from lightning_gpp.strategy.failure import FailureWatch
from lightning_gpp.strategy.leader_state import LeaderState
from lightning_gpp.strategy.lightning_private import is_overridden
from lightning_gpp.strategy.loaders import RemoteBatch
from lightning_gpp.strategy.logs import LogRecorder, recording, replay

LEADER_HOOKS = tuple(
    f"on_{stage}_{when}"
    for stage in ("train", "validation", "test", "predict")
    for when in ("batch_start", "batch_end", "epoch_end")
)


class HookRelay:
    """Puts relays in the place of a module's (or data module's) hooks, as instance attributes.

    Args:
        module: whose hooks.
        control: between rank 0 and the others.
        failures: reports what a hook raises.
        leader_state: what a hook changes on rank 0.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        control: Control,
        failures: FailureWatch,
        leader_state: LeaderState,
    ) -> None:
        self._module = module
        self._control = control
        self._failures = failures
        self._leader_state = leader_state
        self._installed: list[tuple[object, str]] = []

    def install(self) -> None:
        """Puts the relays in place."""
        for name in LEADER_HOOKS:
            if is_overridden(name, self._module):
                self._put(self._module, name, self._relay(name, getattr(self._module, name)))
        if not self._control.is_leader:
            before_transfer = "on_before_batch_transfer"
            owners: list[Any] = [self._module]
            data = getattr(self._module.trainer, "datamodule", None)
            if data is not None and is_overridden(before_transfer, data):
                owners.append(data)
            for owner in owners:
                self._put(owner, before_transfer, _skip_remote(getattr(owner, before_transfer)))

    def remove(self) -> None:
        """Takes the relays away; the module is as the user wrote it."""
        for owner, name in self._installed:
            owner.__dict__.pop(name, None)
        self._installed = []

    def _put(self, owner: object, name: str, function: Callable[..., Any]) -> None:
        owner.__dict__[name] = function
        self._installed.append((owner, name))

    def _relay(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def relayed(*args: Any, **kwargs: Any) -> Any:
            with self._failures.guard():
                if self._control.is_leader:
                    recorder = LogRecorder(self._module)
                    with (
                        self._control.alone(name),
                        self._leader_state.watching(name),
                        recording(self._module, recorder),
                    ):
                        answer = hook(*args, **kwargs)
                    calls = recorder.combined(None)
                    self._control.tell((answer, calls, self._leader_state.take_changes()))
                else:
                    answer, calls, changes = self._control.hear(f"waiting for rank 0's {name}")
                    self._leader_state.apply(changes)
                replay(self._module, calls)
            return answer

        return relayed


def _skip_remote(hook: Callable[..., Any]) -> Callable[..., Any]:
    def skipping(batch: Any, dataloader_idx: int) -> Any:
        return batch if isinstance(batch, RemoteBatch) else hook(batch, dataloader_idx)

    return skipping
