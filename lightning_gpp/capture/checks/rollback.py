"""Running a model without leaving traces on it."""

from __future__ import annotations

import collections
import copy
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.common.torch_device import (
    accelerator_random_states,
    set_accelerator_random_states,
)

_CONTAINERS = frozenset(
    {list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict}
)
_NUMBERS = frozenset({bool, int, float, str, type(None)})
_OWN = frozenset({"training", "_parameters", "_buffers", "_modules"})


@dataclass
class Changes:
    """What a forward changed and a rollback took back.

    Attributes:
        attributes: qualified names of plain attributes (counters, lists, cached tensors).
        kept: those that held a tensor which gradients flow through.
    """

    attributes: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


@contextmanager
def rollback(module: nn.Module) -> Iterator[Changes]:
    """Restores on exit everything that a forward may change.

    Random generators (torch, numpy, random), buffers, gradients, training flags, and the plain
    Python attributes of all sub-modules (numbers, tensors, and the items of lists and dicts).
    Parameters are not copied: no forward changes them.
    """
    changes = Changes()
    saved = [_SavedModule(name, item) for name, item in module.named_modules()]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    with seeded(None):
        try:
            yield changes
        finally:
            for item in saved:
                changes.kept += item.kept()
                changes.attributes += item.restore()
            for parameter, gradient in gradients:
                parameter.grad = gradient


class Snapshot:
    """The plain attributes and buffers of a module and its sub-modules, to be put back.

    Args:
        module: whose; its parameters and the random generators are left alone.
    """

    def __init__(self, module: nn.Module) -> None:
        self._saved = [_SavedModule(name, item) for name, item in module.named_modules()]

    def restore(self) -> None:
        """Puts everything back."""
        for item in self._saved:
            item.restore()


class ModuleState(Snapshot):
    """The same with the states of all random generators.

    Args:
        module: whose attributes and buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._random = _RandomStates()

    def restore(self) -> None:
        """Puts everything back."""
        super().restore()
        self._random.restore()


class _RandomStates:
    """The states of all random generators (torch, numpy, random) at one moment."""

    def __init__(self) -> None:
        self._numpy = sys.modules.get("numpy")
        self._torch, self._python = torch.random.get_rng_state(), random.getstate()
        self._accelerators = accelerator_random_states()
        self._numpy_state = self._numpy.random.get_state() if self._numpy else None

    def restore(self) -> None:
        torch.random.set_rng_state(self._torch)
        random.setstate(self._python)
        set_accelerator_random_states(self._accelerators)
        if self._numpy:
            self._numpy.random.set_state(self._numpy_state)


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Restores the states of all random generators on exit; seeds them first, if asked."""
    states, numpy = _RandomStates(), sys.modules.get("numpy")
    try:
        if seed is not None:
            torch.manual_seed(seed)
            random.seed(seed)
            if numpy:
                numpy.random.seed(seed)
        yield
    finally:
        states.restore()


@contextmanager
def training_flags(module: nn.Module, flags: Mapping[str, bool]) -> Iterator[None]:
    """Sets the training flag of each sub-module by qualified name, and restores them on exit."""
    before = [(item, item.training) for item in module.modules()]
    try:
        for name, item in module.named_modules():
            _set_flag(item, flags.get(name, item.training))
        yield
    finally:
        for item, training in before:
            _set_flag(item, training)


def _set_flag(module: nn.Module, training: bool) -> None:
    if module.training != training:  # setting an attribute of a module takes its time
        module.training = training


class _SavedModule:
    """The changeable attributes of one module (not of its sub-modules)."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module, self.training = name, module, module.training
        tables = {key: vars(module).get(key) for key in _OWN - {"training"}}
        # scripted modules have tables of their own kind
        self.tables = {key: dict(table) for key, table in tables.items() if type(table) is dict}
        self.buffers = {
            key: (buffer, buffer.detach().clone())
            for key, buffer in module._buffers.items()
            if buffer is not None
        }
        self.attributes = {
            key: (value, value if type(value) in _NUMBERS else _shallow_copy(value))
            for key, value in vars(module).items()
            if key not in _OWN
        }

    def kept(self) -> list[str]:
        """Names of new or changed attributes that hold a tensor which requires a gradient."""
        return [
            f"{self.name}.{key}".lstrip(".")
            for key, value in vars(self.module).items()
            if type(value) not in _NUMBERS
            and isinstance(value, Tensor)
            and value.requires_grad
            and (key not in self.attributes or self.attributes[key][0] is not value)
        ]

    def restore(self) -> list[str]:
        """Puts everything back; returns the names of the plain attributes that had changed."""
        _set_flag(self.module, self.training)
        for key, table in self.tables.items():
            if _item_ids(vars(self.module)[key]) != _item_ids(table):
                vars(self.module)[key].clear()
                vars(self.module)[key].update(table)
        for buffer, value in self.buffers.values():
            _put_back(buffer, value)
        return [f"{self.name}.{key}".lstrip(".") for key in self._restore_attributes()]

    def _restore_attributes(self) -> Iterator[str]:
        now = vars(self.module)
        for key in [key for key in now if key not in self.attributes and key not in _OWN]:
            del now[key]
            yield key
        for key, (value, content) in self.attributes.items():
            changed = key not in now or now[key] is not value
            now[key] = value
            if content is _NOTHING and not value and not changed:
                continue
            if isinstance(content, _Content):
                changed |= _put_back_container(value, content)
            elif isinstance(value, Tensor):
                changed |= _put_back(value, content)
            if changed:
                yield key


def _shallow_copy(value: Any) -> Any:
    if type(value) in _CONTAINERS:
        return _Content.of(value, set()) if value else _NOTHING
    return value.detach().clone() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class _Content:
    """What a container held, and what the containers in it held."""

    items: Any
    inner: tuple[tuple[Any, _Content], ...]

    @classmethod
    def of(cls, container: Any, seen: set[int]) -> _Content:
        seen.add(id(container))
        values = container.values() if isinstance(container, dict) else container
        nested = [v for v in values if type(v) in _CONTAINERS and id(v) not in seen]
        return cls(copy.copy(container), tuple((v, cls.of(v, seen)) for v in nested))


_NOTHING = _Content((), ())
"""Of an empty container: every module has a dozen of them, for its hooks."""


def _put_back(tensor: Tensor, value: Tensor) -> bool:
    if tensor.is_meta or (tensor.shape == value.shape and torch.equal(tensor, value)):
        return False
    with torch.no_grad():
        if tensor.shape != value.shape:
            tensor.resize_(value.shape)
        tensor.copy_(value)
    return True


def _put_back_container(container: Any, content: _Content) -> bool:
    if content is _NOTHING and not container:
        return False
    changed = [_put_back_container(inner, inside) for inner, inside in content.inner]
    if _item_ids(container) == _item_ids(content.items):
        return any(changed)
    container.clear()
    getattr(container, "extend" if hasattr(container, "extend") else "update")(content.items)
    return True


def _item_ids(container: Any) -> list[Any]:
    items = container.items() if isinstance(container, dict) else ((None, v) for v in container)
    return [(key, id(value)) for key, value in items]
