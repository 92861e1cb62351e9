"""Arguments on another device, and weights that are on one only while they are read.

A model is captured on the device that it will run on, since there may be no other kernels for it;
but the whole of it need not fit there. So a parameter comes to the device when code reads it as an
attribute of its module (or iterates over ``parameters()``), as a copy that gradients flow through,
and goes when nothing refers to that any more. What autograd saves for the backward waits in host
memory: of a weight only where it is, so that the device has the weights and activations of the
module that runs, and not those of the model (as FSDP does with ``CPUOffload``).

Buffers, which a forward may change, are on the device all the time, as are parameters that code
can reach in another way: the flat list of ``nn.LSTM``, a list of the user's, TorchScript.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from lightning_gpp.capture.checks.check import parameter_state
from lightning_gpp.capture.values.structure import flatten
from lightning_gpp.common.instance_attribute import replaced
from lightning_gpp.common.tensor_places import tensor_places

_ORIGINAL = "_lightning_gpp_original"


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


class HostWeights:
    """The weights of a module that runs on a device which they are not on.

    Args:
        module: whose; nothing happens to what is on the device.
        device: of the arguments; nothing happens at all if it is the CPU or ``meta``.

    Attributes:
        changed: names of the parameters that a forward changed while that was looked for.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self.changed: set[str] = set()
        self._names: dict[int, str] = {}
        self._read: dict[int, Tensor] = {}
        self._resident: dict[int, Tensor] = {}
        self._copies: dict[int, weakref.ref[Tensor]] = {}  # by the id of the original
        self._origins: dict[int, tuple[Tensor, weakref.ref[Tensor]]] = {}  # by the copy's storage
        self._calls: list[dict[int, tuple[Tensor, str]]] | None = None
        if device.type in ("cpu", "meta"):
            return
        known = _known_otherwise(module)
        for place in tensor_places(module):
            tensor = place.tensor
            if tensor.device == device:
                continue
            self._names.setdefault(id(tensor), place.name)
            is_read = isinstance(tensor, nn.Parameter) and id(tensor) not in known
            (self._read if is_read else self._resident)[id(tensor)] = tensor

    @contextmanager
    def resident(self) -> Iterator[None]:
        """What is on the device all the time is there while the body runs."""
        with on_device(self._resident.values(), self._device):
            yield

    @contextmanager
    def visiting(self, *, watched: bool = False) -> Iterator[None]:
        """Parameters come to the device when code in the body reads them.

        Args:
            watched: whether to look for changes of them, see :attr:`changed`. They are then on the
                device as long as the module call runs that reads them.
        """
        if not self._read:
            yield
            return
        hooks = torch.autograd.graph.saved_tensors_hooks(self._packed, self._unpacked)
        with self._handed_out(), hooks, self._watched() if watched else nullcontext():
            try:
                yield
            finally:
                self._copies.clear()

    def source(self, tensor: Tensor) -> Tensor:
        """The parameter whose copy's memory a tensor uses; the tensor itself if it uses none."""
        if not self._origins or tensor.layout is not torch.strided:
            return tensor
        parameter, copy = self._origins.get(_storage(tensor), (tensor, None))
        return tensor if copy is None or copy() is None else parameter

    @contextmanager
    def _handed_out(self) -> Iterator[None]:
        """Modules hand out copies in place of their parameters."""
        read_attribute, named_parameters = nn.Module.__getattr__, nn.Module.named_parameters

        def read(module: nn.Module, name: str) -> Any:
            value: Any = read_attribute(module, name)
            return self._copy(value) if id(value) in self._read else value

        def named(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            for name, value in named_parameters(module, *args, **kwargs):
                yield name, self._copy(value) if id(value) in self._read else value

        changes = [(nn.Module, "__getattr__", read), (nn.Module, "named_parameters", named)]
        with replaced(changes):
            yield

    def _copy(self, parameter: Tensor) -> Tensor:
        known = self._copies.get(id(parameter))
        copy = None if known is None else known()
        if copy is None:
            # Not recorded as a call of the forward, and what it is used for may want a gradient.
            with torch._C.DisableTorchFunction(), torch.enable_grad():
                copy = parameter.to(self._device)
            vars(copy).update(vars(parameter), _is_param=True, **{_ORIGINAL: parameter})
            self._copies[id(parameter)] = weakref.ref(copy)
            key = _storage(copy)
            self._origins[key] = (
                parameter,
                weakref.ref(copy, lambda _: self._origins.pop(key, None)),
            )
            if self._calls is not None:
                self._calls[-1][id(parameter)] = copy, parameter_state(copy)
        return copy

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Copies stay until the module call is over that read them, and are compared then."""

        def begin(*_: Any) -> None:
            assert self._calls is not None
            self._calls.append({})

        def end(*_: Any) -> None:
            assert self._calls is not None
            for key, (copy, before) in self._calls.pop().items():
                if parameter_state(copy) != before:
                    self.changed.add(self._names[key])

        self._calls = [{}]
        handles = [
            register_module_forward_pre_hook(begin),
            register_module_forward_hook(end, always_call=True),
        ]
        try:
            yield
            end()
        finally:
            self._calls = None
            for handle in handles:
                handle.remove()

    # What autograd saves -----------------------------------------------------------------------

    def _packed(self, tensor: Tensor) -> Any:
        """The tensor, or what makes it again."""
        parameter = self.source(tensor)
        if parameter is not tensor and parameter.dtype == tensor.dtype:
            view = tensor.size(), tensor.stride(), tensor.storage_offset()
            return lambda: parameter.detach().to(self._device).as_strided(*view)
        if tensor.device != self._device or tensor.layout is not torch.strided:
            return tensor  # the sizes of a packed sequence's batches belong on the CPU
        if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride())):
            return tensor  # expanded: it is smaller than it seems
        return partial(_like, _like(tensor, torch.device("cpu")), self._device)

    def _unpacked(self, saved: Any) -> Any:
        return saved if isinstance(saved, Tensor) else saved()


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy with the same strides, which kernels may count on."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.copy_(tensor)


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _known_otherwise(module: nn.Module) -> set[int]:
    """Ids of tensors that code can have without asking a module for its parameters."""
    found = set()
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            found |= {id(parameter) for parameter in part.parameters()}
            continue
        own = vars(part).keys() - {"_parameters", "_buffers", "_modules"}
        for value in (vars(part)[name] for name in own):
            items = value.values() if isinstance(value, dict) else value
            items = items if isinstance(value, dict | list | tuple) else [value]
            found |= {id(item) for item in items if isinstance(item, Tensor)}
    return found
