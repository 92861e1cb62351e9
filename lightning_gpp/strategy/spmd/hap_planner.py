"""HAP's planner for the devices of a run: what they can do, and programs for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_gpp.cluster import Cluster
from lightning_gpp.spmd.costs.machine import (
    CollectiveTimes,
    DeviceSpeeds,
    Machine,
    collective_times,
    device_speeds,
)
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.placement import Placement
from lightning_gpp.spmd.plan import plan_hap
from lightning_gpp.spmd.program import SpmdProgram
from lightning_gpp.spmd.rules.theory import Theory
from lightning_gpp.spmd.search.find import find_program
from lightning_gpp.spmd.search.limits import Allowed, DataParallel


def machine_of(
    cluster: Cluster,
    measured: DeviceSpeeds | None,
    times: CollectiveTimes | None = None,
) -> Machine:
    """The devices as prices see them.

    Args:
        cluster: of the run.
        measured: speeds of its devices; by their data sheets where not given.
        times: measured ones of collectives; by the cluster's links where not given.
    """
    sizes = [device.memory_bytes for device in cluster.devices]
    limits = np.array([np.inf if size is None else float(size) for size in sizes])
    speeds = measured or device_speeds(cluster)
    return Machine(speeds, times or collective_times(cluster), limits)


@dataclass(frozen=True, slots=True)
class HapPlanner:
    """Searches programs for some devices.

    Attributes:
        machine: the devices.
        has_shares: whether the user gave the shares; otherwise they are found with the program.
        is_data_parallel: whether samples are dealt by the given shares, and nothing else.
    """

    machine: Machine
    has_shares: bool
    is_data_parallel: bool = False

    def __call__(
        self,
        graph: SpmdGraph,
        shares: Sequence[float],
        storage: Mapping[str, Placement] | None,
    ) -> SpmdProgram:
        """The program of an export.

        Raises:
            NoProgramFitsError: no program with these shares fits the memory of all devices.
        """
        is_training = any(value.requires_grad for value in graph.values)
        machine = replace(self.machine, is_training=is_training)
        if storage is None and not (self.has_shares or self.is_data_parallel):
            return plan_hap(graph, machine).program
        theory = Theory(graph, machine.num_devices)
        allowed = DataParallel(graph, theory) if self.is_data_parallel else Allowed(storage)
        return find_program(
            *(graph, machine, tuple(shares), theory),
            allowed=allowed,
            limits_memory=storage is None,  # what is divided already stays so, if it fits or not
            name="data parallel" if self.is_data_parallel else "hap",
        ).program
