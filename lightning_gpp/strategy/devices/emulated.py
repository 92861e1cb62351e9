"""The accelerator ``emulated``: devices of a cluster description instead of real ones.

``Trainer(accelerator="emulated", devices=4, strategy=GraphPipeStrategy(cluster="summit"))`` runs
the real strategy, its messages and its sums on CPU processes of this machine, while everything in
a training step takes the time that it would take on the devices and links of the cluster.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lightning_gpp.cluster import PRESETS
from lightning_gpp.strategy.devices.accelerators import OurAccelerator
from lightning_gpp.strategy.devices.devices_at_hand import (
    ClusterLike,
    check_cluster,
    resolve_cluster,
)
from lightning_gpp.strategy.settings import Emulated, Settings

_NUMBER = 'accelerator="emulated" takes a number of devices, as in devices=4'


class EmulatedAccelerator(OurAccelerator):
    """Devices that exist on paper; for the graphpipe strategies only.

    Args:
        cluster: the devices and links, as ``GraphPipeStrategy(cluster=...)`` takes them; by default
            that of the strategy.
        time_scale: real seconds that an emulated second takes; by default chosen so that the real
            work of a step fits into its emulated time on this machine.

    Raises:
        ValueError: an option makes no sense.
        TypeError: the cluster is none.
    """

    kind = "emulated"
    expected = _NUMBER

    def __init__(
        self,
        cluster: ClusterLike | None = None,
        *,
        time_scale: float | None = None,
    ) -> None:
        check_cluster(cluster)
        if time_scale is not None and not time_scale > 0:
            raise ValueError(f"time_scale must be above 0, got {time_scale}")
        self.cluster = cluster
        self.time_scale = time_scale

    def apply(self, settings: Settings, *, num_devices: int, num_nodes: int) -> Settings:
        """The settings of a strategy that runs on these devices.

        Args:
            settings: what the user asked of the strategy.
            num_devices: devices of the Trainer.
            num_nodes: hosts of the Trainer.

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
        return replace(settings, cluster=cluster, emulated=Emulated(self.time_scale))

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """The number of devices.

        Raises:
            TypeError: it is no number.
            ValueError: it is below 1.
        """
        if isinstance(devices, str) and devices.strip().isdigit():
            devices = int(devices)
        if not isinstance(devices, int) or isinstance(devices, bool):
            raise TypeError(f"{_NUMBER}; got devices={devices!r}")
        if devices < 1:
            raise ValueError(f"{_NUMBER}; got devices={devices}")
        return devices

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """The CPU for every rank."""
        return [torch.device("cpu")] * devices
