"""Tensors on their way through host memory: for ranks on GPUs whose wire moves CPU memory only.

Host memory is pinned, so that copies run at the speed of the bus and beside the GPU's work; torch
keeps freed pinned memory for the next tensor of that size. A copy to the host waits for the work
that makes the tensor. A copy from the host runs on a stream of its own, in the thread that
receives, so that it does not queue behind compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def needs_staging(device: torch.device) -> bool:
    """Whether gloo, which moves CPU memory only, cannot take tensors of a device as they are."""
    return device.type not in ("cpu", "meta")


class HostStaging:
    """Copies between the memory of a device and host memory.

    Args:
        device: whose tensors; on a CPU the same copies are made, of ordinary memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pins = device.type == "cuda"
        if self._pins:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._reader = torch.cuda.current_stream(device)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory for a tensor."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self._pins)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor in host memory, complete on return."""
        return self.buffer(tensor.shape, tensor.dtype).copy_(tensor)

    def to_device(self, host: Tensor) -> Tensor:
        """A copy of host memory on the device, complete on return."""
        if not self._pins:
            return host.to(self._device, copy=True)
        with torch.cuda.stream(self._stream):
            tensor = host.to(self._device, non_blocking=True)
        self._stream.synchronize()
        tensor.record_stream(self._reader)  # who frees it will have used it there
        return tensor
