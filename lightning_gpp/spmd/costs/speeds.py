"""How fast every device computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lightning_gpp.cluster import Cluster
from lightning_gpp.spmd.costs.share_cost import Vector


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSpeeds:
    """Sustained speeds of all devices; every array has shape ``(num_devices,)``.

    Attributes:
        flops_per_s: of products of matrices.
        memory_bytes_per_s: of reading and writing.
        launch_s: seconds of an operator at least.
        update_s_per_byte: seconds of the optimizer's step per byte of a parameter; zeros where
            nothing is known of it.
    """

    flops_per_s: Vector
    memory_bytes_per_s: Vector
    launch_s: Vector
    update_s_per_byte: Vector

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares in proportion to the flops."""
        return tuple((self.flops_per_s / self.flops_per_s.sum()).tolist())


def device_speeds(cluster: Cluster) -> DeviceSpeeds:
    """Speeds in float32 from the data sheets of the cluster's devices.

    Raises:
        ValueError: there is no data sheet of a kind of device, or not of float32.
    """
    kinds = [cluster.device_kind(device.kind) for device in cluster.devices]
    return DeviceSpeeds(
        np.array([kind.flops_per_s("float32") for kind in kinds]),
        np.array([kind.memory_bytes_per_s for kind in kinds]),
        np.array([kind.launch_s for kind in kinds]),
        np.zeros(len(kinds)),
    )


def measured_speeds(
    flops_per_s: ArrayLike,
    memory_bytes_per_s: ArrayLike | None = None,
    launch_s: ArrayLike | None = None,
    update_s_per_byte: ArrayLike | None = None,
) -> DeviceSpeeds:
    """Speeds that were measured, one number per device.

    Args:
        flops_per_s: of products of matrices.
        memory_bytes_per_s: without limit if not given.
        launch_s: nothing if not given.
        update_s_per_byte: likewise.

    Raises:
        ValueError: a speed is not above 0.
    """
    flops = np.array(flops_per_s, dtype=float)
    if flops.size == 0 or flops.min() <= 0:
        raise ValueError(
            f"every device needs a speed above 0, got {flops.tolist()}; leave a device out "
            "that cannot compute"
        )
    endless, nothing = np.full(len(flops), np.inf), np.zeros(len(flops))
    return DeviceSpeeds(
        flops,
        endless if memory_bytes_per_s is None else np.array(memory_bytes_per_s, dtype=float),
        nothing if launch_s is None else np.array(launch_s, dtype=float),
        nothing if update_s_per_byte is None else np.array(update_s_per_byte, dtype=float),
    )
