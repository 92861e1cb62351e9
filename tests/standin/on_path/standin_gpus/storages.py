"""Storages on a device: torch makes them with constructors that only a build with CUDA has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, UntypedStorage

from standin_gpus.library import device_index

_clone_of_host = UntypedStorage.clone
_to_host = UntypedStorage.to


def apply() -> None:
    """Patches copies of storages."""
    UntypedStorage.clone = _clone
    UntypedStorage.cuda = _to_cuda
    UntypedStorage.to = _to


def _clone(self: UntypedStorage) -> UntypedStorage:
    return _copy(self, self.device) if self.device.type == "cuda" else _clone_of_host(self)


def _to_cuda(self: UntypedStorage, device: Any = None, non_blocking: bool = False) -> Any:
    return _copy(self, torch.device("cuda", device_index(device)))


def _to(self: UntypedStorage, *, device: Any, non_blocking: bool = False) -> UntypedStorage:
    device = torch.device(device)
    if device.type == "cuda":
        return _copy(self, torch.device("cuda", device_index(device)))
    return _to_host(self, device=device, non_blocking=non_blocking)


def _copy(storage: UntypedStorage, device: torch.device) -> UntypedStorage:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
    copy.copy_(_bytes_of(storage))
    return copy.untyped_storage()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
