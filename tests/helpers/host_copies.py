"""Copies to host memory on a machine without GPUs, which a thread waits for all the same."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.runtime.device_copies import DeviceCopies


class HostCopies(DeviceCopies):
    """Ordinary memory, which is complete a moment after the copy has begun."""

    def __init__(self, delay_s: float = 0.02) -> None:
        self._delay_s = delay_s

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        found = [self.buffer(tensor.shape, tensor.dtype).zero_() for tensor in tensors]
        copied = _Copied()

        def copy() -> None:
            for host, tensor in zip(found, tensors, strict=True):
                host.copy_(tensor)
            copied.set()

        threading.Timer(self._delay_s, copy).start()
        return found, copied


class _Copied(threading.Event):
    def synchronize(self) -> None:
        self.wait()
