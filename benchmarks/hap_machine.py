"""The cluster of HAP's experiments: 2 machines of 8 V100 and 6 of 8 P100, joined at 10.4 Gb/s.

Sustained speeds are those in the paper's release (3.86 and 2.15 Tflop/s in float32). Not published,
and assumed: 10 GB/s between the devices of a machine (PCIe), latencies of 10 and 20 us, memory
bandwidths of the data sheets (900 and 732 GB/s) at 85 %.
"""

from __future__ import annotations

import numpy as np

from lightning_gpp.cluster import Cluster, ClusterLayout, DeviceKind, HostGroup, Link
from lightning_gpp.spmd.costs.collective_times import collective_times
from lightning_gpp.spmd.costs.prices import Machine
from lightning_gpp.spmd.costs.speeds import device_speeds

KINDS = (
    DeviceKind("V100", {"float32": 3.86e12}, 900e9, 16 * 10**9, memory_efficiency=0.85),
    DeviceKind("P100", {"float32": 2.15e12}, 732e9, 16 * 10**9, memory_efficiency=0.85),
)


def hap_cluster(num_v100_machines: int = 2, num_p100_machines: int = 6) -> Cluster:
    """So many machines of 8 devices each."""
    numbers = (("V100", num_v100_machines), ("P100", num_p100_machines))
    return ClusterLayout(
        tuple(HostGroup(kind, 8, number) for kind, number in numbers if number),
        host_link=Link(10e9, 10e-6),
        rack_link=Link(10.4e9 / 8, 20e-6, is_shared=True),
        device_kinds=KINDS,
    ).cluster()


def hap_machine(cluster: Cluster, *, has_limits: bool = True) -> Machine:
    """Speeds, collectives and memory of the cluster's devices."""
    memory = [device.memory_bytes or np.inf for device in cluster.devices]
    return Machine(
        device_speeds(cluster),
        collective_times(cluster),
        np.array(memory, dtype=float) if has_limits else np.full(len(memory), np.inf),
    )
