"""Copies between devices and host memory, with as few waits of the host as possible.

A copy out of a device is complete when the work before it is done, so each one that is waited for
lets the device run dry. Copies of several tensors are waited for together. A copy to a device out
of pinned memory is not waited for at all: the work after it, in the same stream, finds it there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_gpp.common.torch_device import is_accelerator, synchronize


def to_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors in host memory, without their graph; for each device the host waits once.

    What is there already, or on ``meta``, stays what it is.

    >>> to_host([torch.ones(2, requires_grad=True)])
    [tensor([1., 1.])]
    """
    given = [tensor.detach() for tensor in tensors]
    devices = {tensor.device for tensor in given if is_accelerator(tensor.device)}
    copies = [t.to("cpu", non_blocking=True) if t.device in devices else t for t in given]
    for device in devices:
        synchronize(device)
    return copies


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, for work that is queued after this; the host does not wait.

    One on ``meta`` stays there.

    >>> to_device(torch.ones(2), torch.device("cpu"))
    tensor([1., 1.])
    """
    if tensor.is_meta:
        return tensor
    if tensor.device.type == "cpu" and is_accelerator(device):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


_SMALL = 1 << 16  # entries


class Originals:
    """The host tensors that small device tensors were copied from, to read without a wait."""

    def __init__(self) -> None:
        self._noted = WeakTensorKeyDictionary()

    def note(self, given: Any, placed: Any) -> None:
        """Remembers them.

        Args:
            given: a value.
            placed: the same value after its tensors went to a device.
        """
        (originals, before), (copies, after) = map(pytree.tree_flatten, (given, placed))
        for original, copy in zip(originals, copies, strict=True) if before == after else ():
            if _is_small(original) and _is_small(copy) and original.stride() == copy.stride():
                self._noted[copy] = copy._version, original

    def of(self, value: Any) -> Any:
        """The same value with tensors, and views of them, in host memory where that is known."""
        return pytree.tree_map_only(Tensor, self._of, value)

    def number(self, value: Any) -> Any:
        """What a number is in Python; one on a device (a learning rate) is read once it changes."""
        if not isinstance(value, Tensor):
            return value
        known = self._of(value)
        if is_accelerator(known.device):
            known = value.detach().cpu()
            self.note(known, value)
        return known.item()

    def _of(self, tensor: Tensor) -> Tensor:
        copy = tensor if tensor._base is None else tensor._base
        if copy not in self._noted:
            return tensor
        version, original = self._noted[copy]
        if version != copy._version or tensor.dtype != original.dtype:
            return tensor
        start = original.storage_offset() + tensor.storage_offset() - copy.storage_offset()
        found: Tensor = original.as_strided(tensor.shape, tensor.stride(), start)
        return found


def _is_small(leaf: Any) -> bool:
    """Whether it is a tensor that a CPU looks through in less time than a wait may take."""
    return (
        isinstance(leaf, Tensor)
        and leaf.layout is torch.strided
        and leaf.numel() <= _SMALL
        and not leaf.is_inference()  # which counts no changes
    )
