"""The accelerators ``emulated`` (devices of a described cluster) and ``pool`` (a mixed list).

``Trainer(accelerator="emulated", devices=4, strategy=GraphPipeStrategy(cluster="summit"))`` runs
the real strategy, its messages and its sums on CPU processes of this machine, while everything in
a training step takes the time that it would take on the devices and links of the cluster.

``Trainer(accelerator="pool", devices="cuda:0,cuda:1,cpu", strategy="graphpipe")`` has one rank per
entry, in this order. Rank 0, which reads the data, computes the loss, logs and writes checkpoints,
is on the first one. An entry may come several times: every ``cpu`` is a process of its own, and two
ranks may share a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry, CPUAccelerator

from lightning_gpp.cluster import PRESETS
from lightning_gpp.common.torch_device import is_accelerator
from lightning_gpp.strategy.devices.devices_at_hand import (
    ClusterLike,
    check_cluster,
    resolve_cluster,
)
from lightning_gpp.strategy.settings import Settings

_NUMBER = 'accelerator="emulated" takes a number of devices, as in devices=4'
_LIST = (
    'accelerator="pool" takes the list of its devices, one rank per entry: '
    'devices="cuda:0,cuda:1,cpu" or devices=["cpu", "cpu"]'
)


class OurStrategy:
    """What our accelerators ask of a strategy."""


class OurAccelerator(CPUAccelerator):
    """Base of the accelerators that only our strategies can use; defaults are those of a CPU."""

    kind: ClassVar[str]
    """Its name in Lightning's registry."""

    expected: ClassVar[str]
    """What ``devices`` has to be."""

    def setup(self, trainer: pl.Trainer) -> None:
        """Refuses other strategies.

        Raises:
            TypeError: the strategy is none of ours; the text has the remedy.
        """
        if not isinstance(trainer.strategy, OurStrategy):
            raise TypeError(
                f'accelerator="{self.kind}" works with the graphpipe strategies only, not with '
                f'{type(trainer.strategy).__name__}: use Trainer(strategy="graphpipe"), or another '
                "accelerator"
            )

    @classmethod
    def name(cls) -> str:
        """Its name in Lightning's registry."""
        return cls.kind

    @classmethod
    def auto_device_count(cls) -> int:
        """There is no default number.

        Raises:
            ValueError: always; the text says what to give.
        """
        raise ValueError(f"{cls.expected}; got none")


class EmulatedAccelerator(OurAccelerator):
    """Emulates the devices and links of a cluster on CPUs; for ``strategy="graphpipe"`` only.

    Args:
        cluster: the devices and links, as ``GraphPipeStrategy(cluster=...)`` takes them; by default
            that of the strategy.
        time_scale: real seconds that an emulated second takes; by default chosen so that the real
            work of a step fits into its emulated time on this machine.

    Raises:
        ValueError: an option makes no sense.
        TypeError: the cluster is none.
    """

    kind, expected = "emulated", _NUMBER

    def __init__(
        self, cluster: ClusterLike | None = None, *, time_scale: float | None = None
    ) -> None:
        check_cluster(cluster)
        if time_scale is not None and not time_scale > 0:
            raise ValueError(f"time_scale must be above 0, got {time_scale}")
        self.cluster, self.time_scale = cluster, time_scale

    def apply(self, settings: Settings, *, num_devices: int, num_nodes: int) -> Settings:
        """The settings of a strategy that runs on these devices.

        Raises:
            ValueError: there is no cluster, or there are two, or it has too few devices.
            NotImplementedError: the ranks are on several hosts, or the pipeline does not drain.
        """
        if num_nodes > 1:
            raise NotImplementedError(
                f'accelerator="emulated" runs on one host, got num_nodes={num_nodes}: all emulated '
                "hosts are described by the cluster; give the number of all devices as devices=..."
            )
        if settings.is_asynchronous:
            raise NotImplementedError(
                "emulated devices run schedules that drain after every step; graphpipe "
                f"job=simulate schedule={settings.schedule} predicts one that does not"
            )
        if self.cluster is not None and settings.cluster is not None:
            raise ValueError(
                "the cluster is given twice: remove it from EmulatedAccelerator or from "
                "GraphPipeStrategy"
            )
        cluster = self.cluster or settings.cluster
        if cluster is None:
            raise ValueError(
                'accelerator="emulated" needs the cluster to emulate: GraphPipeStrategy(cluster='
                f'"summit") or EmulatedAccelerator(cluster="summit"); {", ".join(PRESETS)}, a '
                "cluster file, or a Cluster"
            )
        cluster = resolve_cluster(cluster, num_devices)
        return replace(settings, cluster=cluster, is_emulated=True, time_scale=self.time_scale)

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """The number of devices; TypeError or ValueError where it is none, or below 1."""
        try:
            number = int(str(devices))
        except ValueError:
            raise TypeError(f"{_NUMBER}; got devices={devices!r}") from None
        if number < 1:
            raise ValueError(f"{_NUMBER}; got devices={devices}")
        return number


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
        raise TypeError(f"{_LIST}; got devices={devices!r}")
    if not devices:
        raise ValueError(f"{_LIST}; got an empty list")
    return [_device(entry) for entry in devices]


def _device(entry: Any) -> torch.device:
    if not isinstance(entry, str | torch.device):
        raise TypeError(f"{_LIST}; got the entry {entry!r}")
    try:
        device = torch.device(entry)
    except RuntimeError:
        raise ValueError(f"{_LIST}; got the unknown device {entry!r}") from None
    if device.type not in AcceleratorRegistry:
        raise ValueError(
            f"{_LIST}; got {entry!r}, for which Lightning has no accelerator; it has "
            f"{', '.join(sorted(AcceleratorRegistry.available_accelerators()))}"
        )
    if not is_accelerator(device):
        return torch.device(device.type)
    kind, index = device.type, device.index or 0
    count = torch.get_device_module(device).device_count()
    if index >= count:
        there = f"only {kind}:0 to {kind}:{count - 1} are there" if count else "there is none here"
        raise ValueError(
            f"the pool names {kind}:{index}, but {there}, as torch.{kind}.device_count() sees it "
            "(CUDA_VISIBLE_DEVICES may hide some)"
        )
    return torch.device(kind, index)


class PoolAccelerator(OurAccelerator):
    """Devices of several types in one job; for ``strategy="graphpipe"`` and ``"hap"``."""

    kind, expected = "pool", _LIST
    _own: Accelerator | None = None

    def setup_device(self, device: torch.device) -> None:
        """As Lightning's own accelerator does for the device of this rank."""
        self._own = AcceleratorRegistry.get(device.type)
        self._own.setup_device(device)

    def get_device_stats(self, device: str | int | torch.device) -> dict[str, Any]:
        """Lightning's statistics of the device."""
        own: Accelerator = AcceleratorRegistry.get(torch.device(device).type)
        return own.get_device_stats(device)

    def teardown(self) -> None:
        """As Lightning's own accelerator does: of a GPU it frees the memory that torch keeps."""
        if self._own is not None:
            self._own.teardown()

    parse_devices = staticmethod(parse_pool)  # type: ignore[assignment]

    @staticmethod
    def get_parallel_devices(  # type: ignore[override]
        devices: list[torch.device],
    ) -> list[torch.device]:
        """The devices by rank."""
        return devices
