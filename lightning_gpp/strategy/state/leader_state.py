"""What user code on rank 0 changes beside its results, made known to the other ranks.

The user's steps, and hooks that look at data or results, run on rank 0 only. They may set a
learning rate, freeze a layer, stop the training, or change a plain attribute or append a number to
a list that another hook reads on every rank. Such changes travel with the results. Weights changed
there cannot: the other ranks hold most of them.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpp.common.host_copies import KnownNumbers
from lightning_gpp.strategy.logging.metrics import MetricStates
from lightning_gpp.strategy.state.attribute_watch import AttributeWatch
from lightning_gpp.strategy.state.held_elsewhere import HeldElsewhere

_PLAIN = (bool, int, float, str, type(None))
_LIBRARIES = ("torch.", "torchmetrics.", "lightning.", "torch_geometric.")

_MAX_GROUPS = 1 << 20
_RANKS_OWN = frozenset({"_current_fx_name", "_jit_is_scripting"})
"""Attributes that Lightning sets on each rank by itself."""

_NO_TENSOR = torch.empty(0)
# Versions are read tensor by tensor, and nothing tells when they change: extensions and compiled
# functions write without Python. So all are looked at, in C: once before user code, once after.
_requires_grad, _version = operator.attrgetter("requires_grad"), operator.attrgetter("_version")

_Place = tuple[Mapping[str, Tensor | None], str]
Key = tuple[str, str | int, str]
State = dict[Key, Any]


@dataclass(frozen=True, slots=True)
class _Watched:
    """The parts of a module that are looked at.

    Attributes:
        parameters: all, by name: the table of the module that holds each, and its key there
            (the tensor itself changes when a checkpoint makes the module whole for a moment).
        buffers: those that must not change, likewise.
        modules: the user's own, with their paths, by ``id``.
    """

    parameters: dict[str, _Place]
    buffers: dict[str, _Place]
    modules: dict[int, tuple[str, nn.Module]]

    @classmethod
    def of(cls, module: pl.LightningModule, elsewhere: frozenset[str]) -> _Watched:
        parts = dict(module.named_modules())
        own = {
            id(part): (path, part)
            for path, part in parts.items()
            if not type(part).__module__.startswith(_LIBRARIES)
        }
        parameters, buffers = {}, {}
        for path, part in parts.items():
            for key, _ in part._parameters.items():  # a scripted module's cannot be iterated over
                parameters[f"{path}.{key}" if path else key] = part._parameters, key
            for key, _ in part._buffers.items():
                if (name := f"{path}.{key}" if path else key) in elsewhere:
                    buffers[name] = part._buffers, key
        return cls(parameters, buffers, own)

    def tensors(self) -> list[Tensor]:
        """Parameters, then buffers; something that never changes in the place of those left out."""
        places = itertools.chain(self.parameters.values(), self.buffers.values())
        found: list[Any] = list(itertools.starmap(operator.getitem, places))
        if all(map(operator.is_not, found, itertools.repeat(None))):
            return found
        return [_NO_TENSOR if tensor is None else tensor for tensor in found]


@dataclass(frozen=True, slots=True)
class _Tensors:
    """What the watched tensors were like at one moment: parameters, then buffers."""

    tensors: list[Tensor]
    requires_grad: bytes
    versions: list[int]

    @classmethod
    def of(cls, tensors: list[Tensor], requires_grad: bytes | None = None) -> _Tensors:
        """What they are like now; which of them require gradients may be known."""
        versions = list(map(_version, tensors))
        return cls(tensors, requires_grad or bytes(map(_requires_grad, tensors)), versions)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What the watched parts were like at one moment; attributes have a watch of their own."""

    tensors: _Tensors
    should_stop: bool
    groups: State
    lists: dict[str, _Filling]


class LeaderState:
    """Watches rank 0's changes and applies them elsewhere.

    Args:
        module: the LightningModule.
        optimizers: its optimizers.
        has_followers: whether there are other ranks; nothing is watched for a rank that has all.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        optimizers: Sequence[Optimizer],
        *,
        has_followers: bool = True,
    ) -> None:
        self._module, self._has_followers = module, has_followers
        self._optimizers = optimizers
        self._changes: State = {}
        self._before: _Snapshot | None = None
        self._what = ""
        self._attributes = AttributeWatch()
        self._metrics = MetricStates(module)
        self._rates = KnownNumbers()
        self._settled: _Watched | None = None
        self._requires_grad: bytes | None = None
        self._seeing: HeldElsewhere | None = None

    def close(self) -> None:
        """Nothing is watched any more."""
        self._attributes.remove()

    def settle(self, elsewhere: frozenset[str]) -> None:
        """The module has been captured: its parameters and sub-modules stay what they are.

        Args:
            elsewhere: names of the buffers that other ranks hold; rank 0 must not change them.
        """
        self._settled, self._requires_grad = _Watched.of(self._module, elsewhere), None
        self._metrics.settle()

    @contextlib.contextmanager
    def watching(self, what: str, seeing: HeldElsewhere | None = None) -> Iterator[None]:
        """Rank 0: collects what its body changes, for :meth:`take_changes`.

        What was frozen or unfrozen since the last body counts as changed in this one: that is the
        same on all ranks already, and telling it costs less than looking twice.

        Args:
            what: the user code that runs in it, for errors.
            seeing: sees what that code does with tensors, if anything does.
        """
        if not self._has_followers:  # one rank holds all and tells nobody
            yield
            return
        self._what, self._seeing = what, seeing
        self._before = self._snapshot(_Tensors.of(self._watched().tensors(), self._requires_grad))
        try:
            with self._attributes.on():
                yield
            self._note_changes()
        finally:
            self._before = self._seeing = None
        for (path, name), change in self._metrics.take_changes().items():
            self._changes["metric", path, name] = change

    def take_changes(self, *, before_forward: bool = False) -> State:
        """Rank 0: what changed in :meth:`watching` and was not taken yet; to be sent.

        Metrics come when it has ended: nothing looks at them on other ranks before.

        Args:
            before_forward: whether stages run next. The first time only user code has run, and
                where that has frozen nothing, as was seen, looking at parameters can wait.

        Raises:
            RuntimeError: a parameter changed.
        """
        if self._before is not None:
            can_wait = before_forward and self._seeing and not self._seeing.may_have_frozen
            self._note_changes(looks_at_tensors=not can_wait)
            self._seeing = None
        changes, self._changes = self._changes, {}
        return changes

    def _note_changes(self, *, looks_at_tensors: bool = True) -> None:
        assert self._before is not None
        watched, before, tensors = self._watched(), self._before, self._before.tensors
        if looks_at_tensors:  # once settled, a step does not exchange parameters for others
            tensors = _Tensors.of(tensors.tensors if self._settled else watched.tensors())
            self._requires_grad = tensors.requires_grad if self._settled else None
        after = self._before = self._snapshot(tensors)
        if (versions := before.tensors.versions) != tensors.versions:
            names = itertools.chain(watched.parameters, watched.buffers)
            same = map(operator.eq, versions, tensors.versions)
            name = next(name for name, is_same in zip(names, same) if not is_same)
            raise RuntimeError(
                f"{self._what} changed the parameter or buffer {name!r}, but runs on rank 0 "
                "only, which does not hold all of the model. Change weights in a hook that "
                "runs on every rank (on_before_zero_grad, optimizer_step) or in a callback."
            )
        self._changes |= _differences(watched, before, after)
        self._changes |= _set_attributes(self._attributes.changed(watched.modules))
        self._attributes.forget()

    def look_again(self) -> None:
        """Rank 0: what has just changed, has changed on all ranks."""
        if self._before is not None:
            self._before = self._snapshot()
            self._attributes.forget()

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Rank 0: takes back what its body changes; for a step that begins anew."""
        watched, before, attributes = self._watched(), self._snapshot(), AttributeWatch()
        try:
            with attributes.on():
                yield
        finally:
            attributes.remove()
            changes = _differences(watched, self._snapshot(), before)
            changes |= _set_attributes(
                (path, name, now, former)
                for path, name, former, now in attributes.changed(watched.modules)
            )
            self.apply(changes)

    def apply(self, changes: Mapping[Key, Any]) -> None:
        """Other ranks: makes rank 0's changes."""
        for (kind, place, name), value in changes.items():
            if kind == "group":
                optimizer, number = divmod(int(place), _MAX_GROUPS)
                group = self._optimizers[optimizer].param_groups[number]
                if isinstance(group.get(name), Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value
            elif kind == "requires_grad":
                self._module.get_parameter(name).requires_grad_(value)
            elif kind == "metric":
                self._metrics.apply((str(place), name), value)
            elif kind == "should_stop":
                self._module.trainer.should_stop = value
            elif kind == "list":
                is_new, kept, entries = value
                if is_new or name not in vars(self._module):
                    setattr(self._module, name, [])
                getattr(self._module, name)[kept:] = entries
            else:
                setattr(self._module.get_submodule(str(place)), name, value)

    def _watched(self) -> _Watched:
        return self._settled or _Watched.of(self._module, frozenset())

    def _snapshot(self, tensors: _Tensors | None = None) -> _Snapshot:
        return _Snapshot(
            tensors or _Tensors.of(self._watched().tensors()),
            should_stop=bool(self._module.trainer.should_stop),
            groups=self._groups(),
            lists={k: _Filling.of(v) for k, v in vars(self._module).items() if type(v) is list},
        )

    def _groups(self) -> State:
        groups: State = {}
        for index, optimizer in enumerate(self._optimizers):
            for number, group in enumerate(optimizer.param_groups):
                for name, value in group.items():
                    if isinstance(value, (*_PLAIN, tuple)):
                        groups["group", index * _MAX_GROUPS + number, name] = value
                    elif isinstance(value, Tensor):  # a capturable learning rate
                        key = "group", index * _MAX_GROUPS + number, name
                        groups[key] = self._rates.of(key, value)
        return groups


def _differences(watched: _Watched, old: _Snapshot, new: _Snapshot) -> State:
    """The new values of what is not as it was."""
    changes: State = {}
    if new.groups != old.groups:
        changes |= {k: v for k, v in new.groups.items() if old.groups.get(k) != v}
    if new.should_stop != old.should_stop:
        changes["should_stop", "", ""] = new.should_stop
    flags, new_flags = old.tensors.requires_grad, new.tensors.requires_grad
    if flags != new_flags:
        for name, was, now in zip(watched.parameters, flags, new_flags):
            if was != now:
                changes["requires_grad", "", name] = bool(now)
    return changes | _filled(old.lists, new.lists)


def _set_attributes(found: Iterable[tuple[str, str, Any, Any]]) -> State:
    """The new values of plain attributes: (path, name, old value, new one)."""
    return {
        ("attribute", path, name): new
        for path, name, old, new in found
        if isinstance(new, _PLAIN)
        and name not in _RANKS_OWN
        and (not isinstance(old, _PLAIN) or old != new)
    }


@dataclass(frozen=True, slots=True)
class _Filling:
    """How far a list was filled at one moment; its ends tell whether it was refilled since."""

    values: list[Any]
    length: int
    first: Any
    last: Any

    @classmethod
    def of(cls, values: list[Any]) -> _Filling:
        first, last = (values[0], values[-1]) if values else (None, None)
        return cls(values, len(values), first, last)

    def kept_by(self, new: _Filling) -> int:
        """How many of its entries are still there, from the first on."""
        is_same = new.values is self.values and (new.first is self.first or not self.length)
        grows = new.length > self.length or (new.length == self.length and new.last is self.last)
        return self.length if is_same and grows else 0


def _filled(old: Mapping[str, _Filling], new: Mapping[str, _Filling]) -> State:
    """Lists of the LightningModule that were assigned, emptied, or that numbers were appended to.

    A change is (whether it is another list, entries that stay, the entries after these).
    """
    changes: State = {}
    for name, now in new.items():
        before = old.get(name, _Filling.of([]))
        is_new = before.values is not now.values
        kept = before.kept_by(now)
        entries = now.values[kept : now.length]
        if (is_new or entries or now.length < before.length) and all(map(_is_number, entries)):
            numbers = [e.detach() if isinstance(e, Tensor) else e for e in entries]
            changes["list", "", name] = is_new, kept, numbers
    return changes


def _is_number(value: Any) -> bool:
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, _PLAIN)
