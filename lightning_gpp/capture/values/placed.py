"""Arguments on another device, and parameters and buffers that visit one."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.capture.values.structure import flatten


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
