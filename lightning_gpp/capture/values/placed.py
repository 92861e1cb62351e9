"""Arguments on another device, and weights that are on one only while they are read.

A model is captured on the device that it will run on, since there may be no other kernels for it;
but the whole of it need not fit there. So a parameter comes to the device when code reads it as an
attribute of its module, as a copy that gradients flow through, and goes when nothing refers to that
any more. What autograd saves for the backward waits in host memory, as with FSDP's ``CPUOffload``.

Buffers, which a forward may change, are on the device all the time, as are parameters that code
can reach in another way: the flat list of ``nn.LSTM``, a list of the user's, TorchScript.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from lightning_gpp.capture.checks.check import check_unchanged, parameter_state
from lightning_gpp.capture.values.structure import flatten, tensors_of
from lightning_gpp.common.instance_attribute import replaced
from lightning_gpp.common.tensor_places import memory_of, tensor_places

_ORIGINAL = "_lightning_gpp_original"
_BY_MEMORY = weakref.WeakValueDictionary[Hashable, Tensor]()
"""Copies of weights on a device."""


def placed(value: Any, device: torch.device, staying: Container[int] = ()) -> Any:
    """A nested container with its tensors on a device; leaves that want gradients stay leaves.

    Args:
        value: the container.
        device: where to.
        staying: numbers of the leaves that stay where they are.
    """
    leaves, structure = flatten(value)
    return structure.unflatten(
        [leaf if i in staying else _placed(leaf, device) for i, leaf in enumerate(leaves)]
    )


def on_host(value: Any) -> list[int]:
    """Numbers of the leaves of a container that are tensors on the CPU."""
    return [
        i
        for i, leaf in enumerate(flatten(value)[0])
        if isinstance(leaf, Tensor) and leaf.device.type == "cpu"
    ]


def _placed(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor) or leaf.device == device:
        return leaf
    return leaf.detach().to(device).requires_grad_(leaf.requires_grad)


@contextmanager
def on_device(tensors: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """Parameters and buffers are on a device while the body runs, and are what they were after it.

    They stay the same objects, since some code has them without asking their modules (the flat
    list of ``nn.LSTM``). What happens to them there is forgotten: running statistics, gradients.

    Args:
        tensors: which of them.
        device: where to.
    """
    away = [tensor for tensor in tensors if tensor.device != device]
    values = [tensor.data for tensor in away]
    gradients = [tensor.grad if tensor.is_leaf else None for tensor in away]
    if not away:
        yield
        return
    try:
        for tensor, value in zip(away, values, strict=True):
            tensor.grad = None
            tensor.data = value.to(device)
        yield
    finally:
        torch.clear_autocast_cache()  # which has parameters cast where they are
        for tensor, value, gradient in zip(away, values, gradients, strict=True):
            tensor.grad = None
            tensor.data = value
            tensor.grad = gradient


def original(tensor: Tensor) -> Tensor:
    """The parameter that a tensor is a copy of; the tensor itself if it is none."""
    found: Tensor = vars(tensor).get(_ORIGINAL, tensor)
    return found


def source(tensor: Tensor) -> Tensor:
    """The parameter whose copy's memory a tensor uses; the tensor itself if it uses none."""
    copy = _BY_MEMORY.get(memory_of(tensor)) if _BY_MEMORY else None
    return tensor if copy is None else original(copy)


class HostWeights:
    """The weights of a module that runs on a device which they are not on.

    Args:
        module: whose; nothing happens to what is on the device.
        device: of the arguments; nothing happens at all if it is the CPU or ``meta``.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        places = () if device.type in ("cpu", "meta") else tensor_places(module)
        away = [place for place in places if place.tensor.device != device]
        otherwise = _known_otherwise(module) if away else ()
        self._names = {
            id(place.tensor): place.name
            for place in away
            if isinstance(place.tensor, nn.Parameter) and id(place.tensor) not in otherwise
        }
        self._resident = [place.tensor for place in away if id(place.tensor) not in self._names]
        self._copies = weakref.WeakValueDictionary[int, Tensor]()  # by the id of the original
        self._calls: list[dict[str, tuple[Tensor, str]]] = []

    def resident(self) -> AbstractContextManager[None]:
        """While the body runs, what stays on the device all the time is there."""
        return on_device(self._resident, self._device)

    @contextmanager
    def visiting(self, *, watched: bool = False) -> Iterator[None]:
        """Parameters come to the device when code in the body reads them.

        Args:
            watched: whether to look for changes of them. They are then on the device as long as
                the module call runs that reads them.

        Raises:
            CaptureError: one was changed.
        """
        if not self._names:
            yield
            return
        read, named = nn.Module.__getattr__, nn.Module.named_parameters

        def read_copy(module: nn.Module, name: str) -> Any:
            return self._copy(read(module, name))

        def named_copies(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            return ((name, self._copy(value)) for name, value in named(module, *args, **kwargs))

        # Modules hand out copies in place of their parameters.
        places = [
            (nn.Module, "__getattr__", read_copy),
            (nn.Module, "named_parameters", named_copies),
        ]
        hooks = torch.autograd.graph.saved_tensors_hooks(self._packed, _unpacked)
        with replaced(places), hooks, self._watched() if watched else nullcontext():
            yield
        self._copies.clear()

    def _copy(self, value: Any) -> Any:
        if id(value) not in self._names:
            return value
        copy = self._copies.get(id(value))
        if copy is None:
            # Not recorded as a call of the forward, and what it is used for may want a gradient.
            with torch._C.DisableTorchFunction(), torch.enable_grad():
                copy = value.to(self._device)
            vars(copy).update(vars(value), _is_param=True, **{_ORIGINAL: value})
            self._copies[id(value)] = _BY_MEMORY[memory_of(copy)] = copy
            if self._calls:
                self._calls[-1][self._names[id(value)]] = copy, parameter_state(copy)
        return copy

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Copies stay until the module call is over that read them, and are compared then."""
        changed = set[str]()

        def begin(*_: Any) -> None:
            self._calls.append({})

        def end(*_: Any) -> None:
            for name, (copy, before) in self._calls.pop().items():
                if parameter_state(copy) != before:
                    changed.add(name)

        begin()
        handles = [
            register_module_forward_pre_hook(begin),
            register_module_forward_hook(end, always_call=True),
        ]
        try:
            yield
            end()
            check_unchanged(changed)
        finally:
            self._calls.clear()
            for handle in handles:
                handle.remove()

    def _packed(self, tensor: Tensor) -> Any:
        """What autograd keeps: a tensor, or what makes it again."""
        parameter = source(tensor)
        if parameter is not tensor and parameter.dtype == tensor.dtype:
            view = tensor.size(), tensor.stride(), tensor.storage_offset()
            return lambda: parameter.detach().to(self._device).as_strided(*view)
        if tensor.device != self._device or tensor.layout is not torch.strided:
            return tensor  # the sizes of a packed sequence's batches belong on the CPU
        if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride())):
            return tensor  # expanded: it is smaller than it seems
        return partial(_like, _like(tensor, torch.device("cpu")), self._device)


def _unpacked(saved: Any) -> Any:
    return saved if isinstance(saved, Tensor) else saved()


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy with the same strides, which kernels may count on."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.copy_(tensor)


def _known_otherwise(module: nn.Module) -> set[int]:
    """Ids of tensors that code can have without asking a module for its parameters."""
    found: list[Tensor] = []
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            found += part.parameters()
        own = vars(part).keys() - {"_parameters", "_buffers", "_modules"}
        found += tensors_of([vars(part)[name] for name in own])
    return set(map(id, found))
