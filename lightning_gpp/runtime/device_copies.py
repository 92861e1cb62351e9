"""Copies tensors of GPUs to pinned host memory and back, for backends that move CPU memory only.

Host memory is pinned, so that copies run at the speed of the bus and beside what the device
computes: out and in have a stream each. torch keeps freed pinned memory for the next tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.common.host_copies import to_device


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tensors that a side stream still writes. The user's stream waits for them, the host does not.

    Attributes:
        event: recorded on that stream once they are complete.
        tensors: allocated on that stream.
    """

    event: Any
    tensors: Sequence[Tensor]

    def wait(self) -> None:
        """Makes the work that this thread queues from now on wait for the arrival."""
        device = self.tensors[0].device
        reader = torch.get_device_module(device).current_stream(device)
        reader.wait_event(self.event)
        for tensor in self.tensors:
            tensor.record_stream(reader)  # who frees it will have used it there


class SideStream:
    """A second stream of a device, beside the computing one.

    Args:
        device: whose.

    Raises:
        NotImplementedError: torch has no streams for devices of its type.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._of_device = torch.get_device_module(device)
        if not hasattr(self._of_device, "Stream"):
            raise NotImplementedError(
                f"messages between ranks on devices of type {device.type!r} need streams, which "
                f"torch.{device.type} does not have; use one such device, or CPUs"
            )
        self.stream = self._of_device.Stream(device=device)

    def current(self) -> AbstractContextManager[Any]:
        """This thread queues on it while the body runs."""
        return self._of_device.stream(self.stream)  # type: ignore[no-any-return]

    def mark(self) -> Any:
        """An event after what is queued so far."""
        event = self._of_device.Event()
        event.record(self.stream)
        return event


class DeviceCopies:
    """Copies between a device and pinned host memory that overlap with its compute.

    Args:
        device: not a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = SideStream(device), SideStream(device)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory for a tensor."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Begins to copy tensors into host memory; the event says when they are there."""
        stream = self._out.stream
        stream.wait_stream(torch.get_device_module(self._device).current_stream(self._device))
        found = []
        with self._out.current():
            for tensor in tensors:
                tensor.record_stream(stream)  # its memory is given to nobody else before
                found.append(self.buffer(tensor.shape, tensor.dtype))
                found[-1].copy_(tensor, non_blocking=True)
        return found, self._out.mark()

    def to_device(self, tensors: Sequence[Tensor]) -> Arrival:
        """Begins to copy host memory to the device."""
        with self._in.current():
            found = [to_device(tensor, self._device) for tensor in tensors]
        return Arrival(self._in.mark(), found)
