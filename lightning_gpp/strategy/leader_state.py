"""What user code on rank 0 changes beside its results, made known to the other ranks.

The user's steps, and hooks that look at data or results, run on rank 0 only. They may set a
learning rate, freeze a layer, stop the training or change a plain attribute that another hook
reads on every rank. Such changes travel with the results. Weights changed there cannot: the other
ranks hold most of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

_PLAIN = (bool, int, float, str, type(None))
_LIBRARIES = ("torch.", "torchmetrics.", "lightning.", "torch_geometric.")

Key = tuple[str, str | int, str]
State = dict[Key, Any]


class LeaderState:
    """Watches rank 0's changes and applies them elsewhere.

    Args:
        module: the LightningModule.
        optimizers: its optimizers.

    Attributes:
        elsewhere: names of the buffers that other ranks hold; rank 0 must not change them.
    """

    def __init__(self, module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> None:
        self._module = module
        self._optimizers = optimizers
        self._changes: State = {}
        self.elsewhere: frozenset[str] = frozenset()

    @contextlib.contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Rank 0: collects what its body changes.

        Raises:
            RuntimeError: the body changed a parameter; ``what`` names it.
        """
        before, versions = self._state(), self._versions()
        yield
        for name, version in self._versions().items():
            if versions.get(name, version) != version:
                raise RuntimeError(
                    f"{what} changed the parameter or buffer {name!r}, but runs on rank 0 only, "
                    "which does not hold all of the model. Change weights in a hook that runs "
                    "on every rank (on_before_zero_grad, optimizer_step) or in a callback."
                )
        after = self._state()
        self._changes = {key: value for key, value in after.items() if before.get(key) != value}

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Rank 0: takes back what its body changes; for rehearsals of the user's step."""
        before = self._state()
        try:
            yield
        finally:
            after = self._state()
            self.apply({key: value for key, value in before.items() if after.get(key) != value})

    def take_changes(self) -> State:
        """Rank 0: what changed since the last call; to be sent."""
        changes, self._changes = self._changes, {}
        return changes

    def apply(self, changes: Mapping[Key, Any]) -> None:
        """Other ranks: makes rank 0's changes."""
        parameters = dict(self._module.named_parameters())
        modules = dict(self._module.named_modules())
        for (kind, place, name), value in changes.items():
            if kind == "group":
                optimizer, number = divmod(int(place), _MAX_GROUPS)
                group = self._optimizers[optimizer].param_groups[number]
                if isinstance(group.get(name), Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value
            elif kind == "requires_grad":
                parameters[name].requires_grad_(value)
            elif kind == "should_stop":
                self._module.trainer.should_stop = value
            else:
                setattr(modules[str(place)], name, value)

    def _state(self) -> State:
        state: State = {("should_stop", "", ""): bool(self._module.trainer.should_stop)}
        for index, optimizer in enumerate(self._optimizers):
            for number, group in enumerate(optimizer.param_groups):
                for name, value in group.items():
                    if isinstance(value, (*_PLAIN, tuple)):
                        state["group", index * _MAX_GROUPS + number, name] = value
                    elif isinstance(value, Tensor):  # a capturable learning rate
                        state["group", index * _MAX_GROUPS + number, name] = value.item()
        for name, parameter in self._module.named_parameters():
            state["requires_grad", "", name] = parameter.requires_grad
        for path, module in self._module.named_modules():
            if not type(module).__module__.startswith(_LIBRARIES):
                for name, value in vars(module).items():
                    if isinstance(value, _PLAIN) and name not in _RANKS_OWN:
                        state["attribute", path, name] = value
        return state

    def _versions(self) -> dict[str, int]:
        versions = {name: p._version for name, p in self._module.named_parameters()}
        return versions | {
            name: buffer._version
            for name, buffer in self._module.named_buffers()
            if name in self.elsewhere
        }


_MAX_GROUPS = 1 << 20
_RANKS_OWN = frozenset({"_current_fx_name", "_jit_is_scripting"})
"""Attributes that Lightning sets on each rank by itself."""
