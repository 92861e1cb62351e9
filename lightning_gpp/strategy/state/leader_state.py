"""Sends the other ranks what user code changes on rank 0.

The user's steps, and hooks that look at data or results, run on rank 0 only. They may set a
learning rate, freeze a layer, stop the training, update a metric, change a plain attribute or
count in a list or dict that another hook reads on every rank. Such changes travel with the
results. Weights changed there cannot: the other ranks hold most of them.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_gpp.common.host_copies import Originals, to_device
from lightning_gpp.common.tensor_places import TensorPlace, num_changes, own_places

_PLAIN = (bool, int, float, str, type(None))
_RANKS_OWN = frozenset({"_current_fx_name", "_jit_is_scripting"})
"""Attributes that Lightning sets on each rank by itself."""

_METRICS_OWN = frozenset(
    {"training", "_computed", "_forward_cache", "_is_synced", "_to_sync", "_should_unsync"}
)
_LIGHTNINGS_OWN = frozenset(vars(pl.LightningModule()))
"""Attributes that every module has."""

_MISSING = object()

# Versions are read tensor by tensor, and nothing tells when they change: extensions and compiled
# functions write without Python. So all are looked at, in C, as attributes are.
_requires_grad, _version = operator.attrgetter("requires_grad"), operator.attrgetter("_version")

_NO_TENSOR = torch.empty(0)
"""In the place of a parameter or buffer that user code set to None."""

Key = tuple[str, Any, str]
"""Kind of a change, the place of what changed, its name."""

State = dict[Key, Any]


_Values = dict[tuple[str, str], tuple[Any, Any]]
"""Path of a part and name of an attribute -> its value, and what tells that this has changed: the
entries of a list or dict, how often a tensor was changed."""


def _seen(value: Any) -> tuple[Any, Any]:
    if isinstance(value, Tensor):
        return value, num_changes(value)
    return value, tuple(_entries(value)) if isinstance(value, list | dict) else None


def _entries(value: list[Any] | dict[Any, Any]) -> list[Any]:
    """Those of a list; keys and values of a dict by turns."""
    return [*itertools.chain.from_iterable(value.items())] if isinstance(value, dict) else value


class _Snapshot(NamedTuple):
    """What the watched parts were like at one moment; metrics are remembered longer."""

    tensors: list[Tensor]
    versions: list[int]
    requires_grad: bytes
    settings: State
    attributes: list[dict[str, Any]]
    lists: _Values


class LeaderState:
    """Watches changes on rank 0, and applies them on the other ranks.

    Args:
        module: the LightningModule.
        optimizers: its optimizers.
        has_followers: whether there are other ranks; nothing is watched for a rank that has all.
    """

    def __init__(
        self, module: pl.LightningModule, optimizers: Sequence[Optimizer], has_followers: bool
    ) -> None:
        self._module, self._has_followers = module, has_followers
        self._optimizers, self._originals = optimizers, Originals()
        self._changes: State = {}
        self._before: _Snapshot | None = None
        self._what = ""
        self._elsewhere: frozenset[str] | None = None
        self._find_parts()
        self._metrics = self._metric_states()

    def settle(self, elsewhere: frozenset[str]) -> None:
        """The module has been captured: its parameters and sub-modules stay what they are.

        Args:
            elsewhere: names of the buffers that other ranks hold; rank 0 must not change them.
        """
        self._elsewhere = elsewhere
        self._find_parts()

    def _find_parts(self) -> None:
        """What is looked at: parameters and buffers that must not change, and all modules.

        The table of a tensor is looked into, with its key there: the tensor itself changes when a
        checkpoint makes the module whole for a moment.
        """
        parts = list(self._module.named_modules())
        places = [place for path, part in parts for place in own_places(part, path)]
        is_parameter = [isinstance(place.tensor, nn.Parameter) for place in places]
        elsewhere = self._elsewhere or frozenset()
        buffers = [p for p, other in zip(places, is_parameter) if not other and p.name in elsewhere]
        self._places = [*itertools.compress(places, is_parameter), *buffers]
        self._parts = [(path, part) for path, part in parts if not isinstance(part, Metric)]
        self._of_metrics = [(path, part) for path, part in parts if isinstance(part, Metric)]

    @contextlib.contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Rank 0: collects what its body changes, for :meth:`take_changes`.

        Args:
            what: the user code that runs in it, for errors.
        """
        if not self._has_followers:  # one rank holds all and tells nobody
            yield
            return
        self._what, self._before = what, self._snapshot()
        try:
            yield
            self._note_changes()
        finally:
            self._before = None
        metrics = self._metric_states()
        self._changes |= _changes(self._metrics, metrics)
        self._metrics = metrics

    def take_changes(self) -> State:
        """Rank 0: what changed in :meth:`watching` and was not taken yet; to be sent.

        Metrics come when it has ended: nothing looks at them on other ranks before.

        Raises:
            RuntimeError: a parameter changed.
        """
        if self._before is not None:
            self._note_changes()
        changes, self._changes = self._changes, {}
        return changes

    def _note_changes(self) -> None:
        assert self._before is not None
        before, after = self._before, self._snapshot(self._before)
        same = list(map(operator.is_, before.tensors, _tensors_at(self._places)))
        if before.versions != after.versions or not all(same):
            same = list(map(operator.and_, same, map(operator.eq, before.versions, after.versions)))
            places = zip(self._places, same)
            name = next(place.name for place, is_same in places if not is_same)
            raise RuntimeError(
                f"{self._what} changed the parameter or buffer {name!r}, but runs on rank 0 "
                "only, which does not hold all of the model. Change weights in a hook that "
                "runs on every rank (on_before_zero_grad, optimizer_step) or in a callback."
            )
        self._before = after
        self._changes |= self._differences(before, after)

    def changed_attributes(self) -> list[str]:
        """Rank 0: names of the attributes that changed in :meth:`watching` and were not taken."""
        if self._before is not None:
            self._note_changes()
        kinds = ("attribute", "list", "dict")
        return [f"{p}.{n}".removeprefix(".") for kind, p, n in self._changes if kind in kinds]

    def look_again(self) -> None:
        """Rank 0: what has just changed, has changed on all ranks."""
        if self._before is not None:
            self._before = self._snapshot()

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Rank 0: takes back what its body changes; for a step that begins anew."""
        before = self._snapshot()
        try:
            yield
        finally:
            self.apply(self._differences(self._snapshot(before), before))

    def apply(self, changes: Mapping[Key, Any]) -> None:
        """Other ranks: makes rank 0's changes."""
        for (kind, place, name), value in changes.items():
            if kind == "group":
                group = self._optimizers[place[0]].param_groups[place[1]]
                if isinstance(group.get(name), Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value
            elif kind == "requires_grad":
                self._module.get_parameter(name).requires_grad_(value)
            elif kind == "should_stop":
                self._module.trainer.should_stop = value
            else:
                _set(self._module.get_submodule(place), name, value, kind)

    def _snapshot(self, earlier: _Snapshot | None = None) -> _Snapshot:
        """What is now; of the same parts and tensors as an earlier one, if that is given.

        A step does not exchange parameters for others, but reading the whole module does.
        """
        if earlier is None and self._elsewhere is None:
            self._find_parts()
        tensors = _tensors_at(self._places) if earlier is None else earlier.tensors
        filled = (
            (name, value)
            for name, value in vars(self._module).items()
            if (type(value) is list or isinstance(value, dict)) and name not in _LIGHTNINGS_OWN
        )
        return _Snapshot(
            tensors,
            list(map(_version, tensors)),
            bytes(map(_requires_grad, tensors)),
            self._settings(),
            [part.__dict__.copy() for _, part in self._parts],
            {("", name): _seen(value) for name, value in filled},
        )

    def _settings(self) -> State:
        found: State = {("should_stop", "", ""): bool(self._module.trainer.should_stop)}
        for index, optimizer in enumerate(self._optimizers):
            for number, group in enumerate(optimizer.param_groups):
                for name, value in group.items():
                    key = "group", (index, number), name
                    if isinstance(value, (*_PLAIN, tuple, Tensor)):
                        found[key] = self._originals.number(value)
        return found

    def _metric_states(self) -> _Values:
        return {
            (path, name): _seen(value)
            for path, metric in self._of_metrics
            for name, value in vars(metric).items()
            if name not in _METRICS_OWN and _is_state(value)
        }

    def _differences(self, old: _Snapshot, new: _Snapshot) -> State:
        """The new values of what is not as it was."""
        changes: State = {}
        if new.settings != old.settings:
            changes |= {k: v for k, v in new.settings.items() if old.settings.get(k) != v}
        if new.requires_grad != old.requires_grad:
            flags = zip(self._places, old.requires_grad, new.requires_grad)
            changes |= {
                ("requires_grad", "", p.name): bool(now) for p, was, now in flags if was != now
            }
        if not _are_same(old.attributes, new.attributes):
            for (path, _), was, now in zip(self._parts, old.attributes, new.attributes):
                for name, value in now.items() if not _are_same([was], [now]) else ():
                    before = was.get(name, _MISSING)
                    if value is before or not isinstance(value, _PLAIN) or name in _RANKS_OWN:
                        continue
                    if not isinstance(before, _PLAIN) or before != value:
                        changes["attribute", path, name] = value
        told = _changes(old.lists, new.lists).items()
        return changes | {key: value for key, value in told if all(map(_is_number, value[2]))}


def _tensors_at(places: Sequence[TensorPlace]) -> list[Tensor]:
    found = [place.table[place.key] for place in places]
    return [_NO_TENSOR if each is None else each for each in found]


def _changes(old: _Values, new: _Values) -> State:
    """The new values; of lists and dicts if it is another one, entries that stay, those after."""
    changes: State = {}
    for (path, name), (value, mark) in new.items():
        was, before = old.get((path, name), (_MISSING, None))
        if isinstance(value, list | dict):
            before = before if isinstance(was, list | dict) else ()
            stays = len(before) <= len(mark) and all(map(operator.is_, before, mark))
            kept, is_new = len(before) if stays else 0, value is not was
            if is_new or not kept == len(before) == len(mark):
                kind = "dict" if isinstance(value, dict) else "list"
                changes[kind, path, name] = is_new, kept, [*map(_copy, mark[kept:])]
            continue
        if isinstance(value, Tensor):  # one whose changes nobody counts is taken as changed
            is_same = value is was and mark == before is not None
        else:
            is_same = type(value) is type(was) and bool(value == was)
        if not is_same:
            changes["attribute", path, name] = _copy(value)
    return changes


def _are_same(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> bool:
    """Whether the same objects are in some dicts, in the same order; looked at in C."""
    if list(map(len, old)) != list(map(len, new)):
        return False
    values = (itertools.chain.from_iterable(map(dict.values, each)) for each in (old, new))
    return all(map(operator.is_, *values))


def _set(part: Any, name: str, value: Any, kind: str) -> None:
    """Sets an attribute of a module; of a list or dict, the entries after those kept."""
    values = vars(part)
    if kind != "attribute":
        is_new, kept, entries = value
        container: Any = dict if kind == "dict" else list
        now = values.get(name)
        now = now if isinstance(now, container) else container()
        if len(now) < kept and isinstance(part, Metric):
            raise RuntimeError(
                f"the list {name!r} of a {type(part).__name__} has other entries on this rank than "
                "on rank 0; do not update or reset metrics on some ranks only"
            )
        entries = [_on_device_of(part, each) for each in entries]
        values[name] = now = copy.copy(now) if is_new else now
        if kind == "dict":
            entries = [*_entries(now)[:kept], *entries]
            now.clear()
            now.update(dict(zip(entries[::2], entries[1::2])))  # a Counter counts pairs
        else:
            now[kept:] = entries
    else:
        values[name] = _on_device_of(part, value)
    if isinstance(part, Metric):
        values["_computed"] = None


def _on_device_of(part: Any, value: Any) -> Any:
    return to_device(value, part.device) if isinstance(value, Tensor) else value


def _is_number(value: Any) -> bool:
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, _PLAIN)


def _is_state(value: Any) -> bool:
    """Whether a value of a metric can be told."""
    if isinstance(value, list):
        return all(isinstance(item, Tensor) for item in value)
    return isinstance(value, (Tensor, *_PLAIN))


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
