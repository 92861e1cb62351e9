"""Arguments on another device, and weights that are on one for a while.

A model is captured on the device that it will run on, since there may be no other kernels for it;
one that is too large for it as a whole is captured on the CPU.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.capture.values.structure import flatten
from lightning_gpp.common.torch_device import free_bytes, is_accelerator

ROOM = 4
"""How often the weights of a model have to fit into the free memory of a device."""


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


def visiting(module: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    """All of a module is on a device while the body runs; nothing happens for ``meta``."""
    if device.type == "meta":
        return nullcontext()
    return on_device([*module.parameters(), *module.buffers()], device)


def capture_device(module: nn.Module, device: torch.device) -> torch.device:
    """Where a module is captured that will run on a device: there, unless it has too little room.

    Room for the weights, their gradients, and activations of a few layers.
    """
    if not is_accelerator(device):
        return device
    size_bytes, free = sum(p.nbytes for p in module.parameters()), free_bytes(device)
    return device if free is None or ROOM * size_bytes <= free else torch.device("cpu")
