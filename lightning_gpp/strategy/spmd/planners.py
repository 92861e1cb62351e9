"""What makes the SPMD program of a run, for the devices that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_gpp.cluster import Cluster
from lightning_gpp.spmd.costs.machine import (
    CollectiveTimes,
    DeviceSpeeds,
    Machine,
    collective_times,
    device_speeds,
    measured_speeds,
)
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.placement import Placement
from lightning_gpp.spmd.plan import plan_hap
from lightning_gpp.spmd.program import SpmdProgram
from lightning_gpp.spmd.rules.theory import Theory
from lightning_gpp.spmd.run.collectives import Collectives
from lightning_gpp.spmd.search.find import find_program
from lightning_gpp.spmd.search.limits import Allowed, DataParallel
from lightning_gpp.strategy.devices.devices_at_hand import (
    DeviceAtHand,
    cluster_at_hand,
    resolve_cluster,
)
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.spmd.measured_speeds import measure_collectives, measure_speeds

ProgramPlanner = Callable[[SpmdGraph, Sequence[float], Mapping[str, Placement] | None], SpmdProgram]
"""Graph, share of every device, and how parameters are stored (None: to be decided) -> program."""

_UPDATE_PASSES = 7
"""Over the memory of a parameter, in a step of Adam: reads four tensors, writes three."""


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
        is_data_parallel: whether samples are divided by the given shares, and nothing else.
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


def planner_for(
    run: PipelinedRun, group: Collectives, name: str, has_shares: bool
) -> HapPlanner | None:
    """All ranks: on rank 0 a planner for the devices that there are or the user describes.

    Args:
        run: of this rank.
        group: the ranks.
        name: ``"data_parallel"`` divides samples by the given shares, and nothing else.
        has_shares: whether the user gave shares.
    """
    devices = run.control.gather(DeviceAtHand.of(run.device), "collecting the devices")
    chosen, num_ranks = run.settings.cluster, run.control.num_ranks
    is_data_parallel = name == "data_parallel"
    speeds = times = None
    if chosen is None:
        # Where samples are divided by the shares that there are, speeds decide nothing; any do
        # beside which a collective's seconds are not lost in rounding.
        speeds = measured_speeds(np.full(num_ranks, 1e12))
        if not is_data_parallel:
            speeds = measure_speeds(run.device, group)
            speeds = replace(speeds, update_s_per_byte=_UPDATE_PASSES / speeds.memory_bytes_per_s)
        times = measure_collectives(group, run.device)
    if not run.control.is_leader:
        return None  # only rank 0 plans
    cluster = cluster_at_hand(devices) if chosen is None else resolve_cluster(chosen, num_ranks)
    return HapPlanner(machine_of(cluster, speeds, times), has_shares, is_data_parallel)
