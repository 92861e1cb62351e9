"""Undoes everything that running a model changes."""

from __future__ import annotations

import collections
import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.capture.checks.observers import without_observers
from lightning_gpp.common.tensor_places import num_changes
from lightning_gpp.common.torch_device import (
    accelerator_random_states,
    set_accelerator_random_states,
)

_CONTAINERS = frozenset(
    {list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict}
)
_OWN = frozenset({"training", "_parameters", "_buffers", "_modules"})
_MISSING = object()


@dataclass
class Changes:
    """Changes by a forward that were undone.

    Attributes:
        attributes: qualified names of plain attributes (counters, lists, cached tensors).
        kept: those that held a tensor which gradients flow through.
    """

    attributes: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


@contextmanager
def rollback(module: nn.Module) -> Iterator[ModuleState]:
    """Restores on exit everything that a forward may change.

    Random generators (torch, numpy, random), buffers, gradients, training flags, and the plain
    Python attributes of all sub-modules (numbers, tensors, and the items of lists and dicts).
    Parameters are not copied: no forward changes them. Hooks that only look on are left out.
    """
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    with without_observers(module):
        state = ModuleState(module)
        try:
            yield state
        finally:
            state.restore()
            for parameter, gradient in gradients:
                parameter.grad = gradient


class ModuleState:
    """The attributes and buffers of a module, and the states of all random generators.

    Args:
        module: the module; its parameters are not kept.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [
            (name and f"{name}.", part, part.training, dict(vars(part)), list(_held(part)))
            for name, part in module.named_modules()
        ]
        self._torch, self._python = torch.random.get_rng_state(), random.getstate()
        self._accelerators, self._numpy = accelerator_random_states(), sys.modules.get("numpy")
        self._numpy_state = self._numpy.random.get_state() if self._numpy else None

    def changes(self) -> Changes:
        """The differences from the present state of the module."""
        found = Changes()
        for prefix, part, _, before, held in self._parts:
            now, changed = vars(part), _replaced_keys(part, before)
            found.kept += [
                f"{prefix}{key}"
                for key in changed
                if isinstance(value := now.get(key), Tensor) and value.requires_grad
            ]
            changed += [key for key, thing, content in held if _is_other(thing, content)]
            plain = (key for key in dict.fromkeys(changed) if key not in _OWN)
            found.attributes += [f"{prefix}{key}" for key in plain]
        return found

    def restore_buffers(self) -> None:
        """Puts the buffers back."""
        for *_, held in self._parts:
            for key, thing, content in held:
                if key == "_buffers":
                    _put_back(thing, content)

    def restore(self) -> None:
        """Puts everything back."""
        for _, part, training, before, held in self._parts:
            _set_flag(part, training)
            for key in _replaced_keys(part, before):
                vars(part).pop(key, None)
                if key in before:
                    vars(part)[key] = before[key]
            for _, thing, content in held:
                _put_back(thing, content)
        torch.random.set_rng_state(self._torch)
        random.setstate(self._python)
        set_accelerator_random_states(self._accelerators)
        if self._numpy:
            self._numpy.random.set_state(self._numpy_state)


def _replaced_keys(part: nn.Module, before: dict[str, Any]) -> list[str]:
    now = vars(part)
    return [k for k in now | before if now.get(k, _MISSING) is not before.get(k, _MISSING)]


def random_state(device: torch.device) -> Tensor:
    """State of torch's generators, of the CPU and of a device; changes when code draws."""
    state = torch.random.get_rng_state()
    if device.type in ("cpu", "meta"):
        return state
    return torch.cat([state, torch.get_device_module(device).get_rng_state(device)])


def seed_all(seed: int) -> None:
    """Seeds all random generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def set_training(module: nn.Module, flags: Mapping[str, bool]) -> None:
    """Sets the training flag of each sub-module by qualified name; a rollback takes it back."""
    for name, part in module.named_modules():
        _set_flag(part, flags.get(name, part.training))


def _set_flag(module: nn.Module, training: bool) -> None:
    if module.training != training:  # setting an attribute of a module takes its time
        module.training = training


def _held(part: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """What a module holds that may change, without its sub-modules: names, things, contents."""
    values = [*vars(part).items(), *(("_buffers", each) for each in part.buffers(False))]
    for key, value in values:
        for thing, content in _contents(value, set()):
            yield key, thing, content


def _contents(value: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    """What a value holds that may change: a tensor itself, a container and those in it."""
    if isinstance(value, Tensor):
        yield value, value.detach().clone()
    elif type(value) in _CONTAINERS and id(value) not in seen:
        seen.add(id(value))
        yield value, copy.copy(value) if value else ()
        for item in value.values() if isinstance(value, dict) else value:
            if type(item) in _CONTAINERS:
                yield from _contents(item, seen)


def _is_other(thing: Any, content: Any) -> bool:
    """Whether a tensor or a container holds something else than it did."""
    if not isinstance(thing, Tensor):
        return bool((thing or content) and _item_ids(thing) != _item_ids(content))
    return not (thing.is_meta or (thing.shape == content.shape and torch.equal(thing, content)))


def _put_back(thing: Any, content: Any) -> None:
    """Gives a tensor or a container what it held."""
    if not _is_other(thing, content):
        return
    if not isinstance(thing, Tensor):
        thing.clear()
        getattr(thing, "extend" if hasattr(thing, "extend") else "update")(content)
        return
    with torch.no_grad():
        if thing.shape != content.shape:
            thing.resize_(content.shape)
        thing.copy_(content)


def _item_ids(container: Any) -> list[Any]:
    items = container.items() if isinstance(container, dict) else ((None, v) for v in container)
    return [(key, id(value)) for key, value in items]


# Buffers that a forward changes alike whatever its arguments are ---------------------------------
#
# A counter of calls, or the vectors of a spectral norm's power iteration, change once per call. Of
# a mini-batch that is cut, every micro-batch is a call: put back before each of them but the first,
# such buffers end up as after one call with the whole mini-batch, and every micro-batch sees what
# that call would see. Buffers that depend on the samples (statistics) cannot be had like this.


def steady_names(
    module: nn.Module,
    changing: Iterable[str],
    after: Mapping[str, Tensor],
    after_other: Mapping[str, Tensor],
) -> frozenset[str]:
    """Which of the buffers that a forward changes are the same after it on other arguments.

    Not the count of a BatchNorm without momentum: it weighs the statistics, which are taken per
    micro-batch.

    Args:
        module: whose forward.
        changing: canonical names of the buffers that it changes.
        after: the buffers after a call, by name.
        after_other: after a call with other arguments.
    """
    return frozenset(
        name
        for name in changing
        if not after[name].is_meta
        and torch.equal(after[name], after_other[name])
        and getattr(owner_of(module, name), "momentum", 0) is not None
    )


def owner_of(module: nn.Module, name: str) -> nn.Module:
    """The sub-module that has a buffer."""
    return module.get_submodule(name.rpartition(".")[0])


def keep(module: nn.Module, names: Iterable[str]) -> Callable[[], None]:
    """Returns a function that puts buffers back to their present values.

    Unchanged ones are left alone, as autograd may have saved them.
    """
    kept = []
    for name in names:
        owner, key = owner_of(module, name), name.rpartition(".")[2]
        tensor = owner._buffers[key]
        assert tensor is not None, f"the buffer {name} was there at capture"
        kept.append((owner, key, tensor, tensor.detach().clone(), num_changes(tensor)))

    def put_back() -> None:
        with torch.no_grad():
            for owner, key, tensor, content, before in kept:
                # Comparing waits for a GPU: only what ``.data`` may have changed is compared.
                now = num_changes(tensor)
                is_written = now is not None and now != before
                may_be = now is None or owner.training
                if is_written or (may_be and not torch.equal(tensor, content)):
                    tensor.copy_(content)
                owner._buffers[key] = tensor

    return put_back
