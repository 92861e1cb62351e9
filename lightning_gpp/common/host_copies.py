"""Copies between devices and host memory that make the host wait as seldom as may be.

A copy out of a device is complete when the work before it is done, so each one that is waited for
lets the device run dry. Copies of several tensors are waited for together. A copy to a device out
of pinned memory is not waited for at all: the work after it, in the same stream, finds it there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

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
