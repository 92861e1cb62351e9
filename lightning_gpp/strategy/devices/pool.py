"""The accelerator ``pool``: a mixed list of real devices, one rank per entry, in this order.

``Trainer(accelerator="pool", devices="cuda:0,cuda:1,cpu", strategy="graphpipe")``. Rank 0, which
reads the data, computes the loss, logs and writes checkpoints, is on the first entry. An entry may
come several times: every ``cpu`` is a process of its own, and two ranks may share a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry

from lightning_gpp.common.torch_device import is_accelerator
from lightning_gpp.strategy.devices.accelerators import OurAccelerator

_EXPECTED = (
    'accelerator="pool" takes the list of its devices, one rank per entry: '
    'devices="cuda:0,cuda:1,cpu" or devices=["cpu", "cpu"]'
)


def parse_pool(devices: Any) -> list[torch.device]:
    """The devices that a ``devices`` flag names, in order.

    Args:
        devices: names separated by commas, or a sequence of names or devices, of all types that
            torch and Lightning know. ``cuda`` stands for ``cuda:0``.

    Raises:
        TypeError: it is no list of devices.
        ValueError: it is empty, or there is no such device; the text says which there are.

    >>> parse_pool("cpu, cpu")
    [device(type='cpu'), device(type='cpu')]
    """
    if isinstance(devices, str):
        devices = [name.strip() for name in devices.split(",") if name.strip()]
    if not isinstance(devices, Sequence):
        raise TypeError(f"{_EXPECTED}; got devices={devices!r}")
    if not devices:
        raise ValueError(f"{_EXPECTED}; got an empty list")
    return [_device(entry) for entry in devices]


def _device(entry: Any) -> torch.device:
    if isinstance(entry, bool | int) or not isinstance(entry, str | torch.device):
        raise TypeError(f"{_EXPECTED}; got the entry {entry!r}")
    try:
        device = torch.device(entry)
    except RuntimeError:
        raise ValueError(f"{_EXPECTED}; got the unknown device {entry!r}") from None
    if device.type not in AcceleratorRegistry:
        raise ValueError(
            f"{_EXPECTED}; got {entry!r}, for which Lightning has no accelerator; it has "
            f"{', '.join(sorted(AcceleratorRegistry.available_accelerators()))}"
        )
    if not is_accelerator(device):
        if device.index is not None:
            raise ValueError(f"{_EXPECTED}; got {entry!r}: name 'cpu' once for every process")
        return device
    kind, index = device.type, device.index or 0
    count = torch.get_device_module(device).device_count()
    if index >= count:
        there = f"only {kind}:0 to {kind}:{count - 1} are there" if count else "there is none here"
        raise ValueError(
            f"the pool names {kind}:{index}, but {there} (as torch.{kind}.device_count() sees it; "
            "CUDA_VISIBLE_DEVICES, or what your devices have in its place, may hide some)"
        )
    return torch.device(kind, index)


def _of(device: torch.device) -> Accelerator:
    """Lightning's own accelerator for a device."""
    found: Accelerator = AcceleratorRegistry.get(device.type)
    return found


class PoolAccelerator(OurAccelerator):
    """Real devices of several types in one job; for the graphpipe strategies only."""

    kind = "pool"
    expected = _EXPECTED

    _own: Accelerator | None = None

    def setup_device(self, device: torch.device) -> None:
        """As Lightning's own accelerator does for the device of this rank."""
        self._own = _of(device)
        self._own.setup_device(device)

    def get_device_stats(self, device: str | int | torch.device) -> dict[str, Any]:
        """What Lightning knows to tell of such a device."""
        return _of(torch.device(device)).get_device_stats(device)

    def teardown(self) -> None:
        """As Lightning's own accelerator does: of a GPU it frees the memory that torch keeps."""
        if self._own is not None:
            self._own.teardown()

    parse_devices = staticmethod(parse_pool)

    @staticmethod
    def get_parallel_devices(devices: list[torch.device]) -> list[torch.device]:
        """The devices by rank."""
        return devices
