"""Which transport joins the processes."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from lightning_gpp.runtime.processes.local_sockets import connect_local
from lightning_gpp.runtime.processes.rank_devices import Wire, choose_wire, gather_rank_devices
from lightning_gpp.runtime.transport import host_staging
from lightning_gpp.runtime.transport.host_staging import HostStaging
from lightning_gpp.runtime.transport.process_transport import ProcessGroupTransport, TransportGroups
from lightning_gpp.runtime.transport.shared_memory_transport import SharedMemoryTransport

log = logging.getLogger(__name__)


def open_transport(
    device: torch.device, timeout_s: float
) -> SharedMemoryTransport | ProcessGroupTransport:
    """All ranks: shared memory between CPUs of one host, NCCL between GPUs, otherwise gloo.

    Args:
        device: where this rank's stages run.
        timeout_s: limit of waits for peers that take no messages.
    """
    wire = choose_wire(gather_rank_devices(device))
    if wire is Wire.NCCL:
        return ProcessGroupTransport(TransportGroups.create("nccl"), device)
    if wire is Wire.SHARED_MEMORY and (sockets := connect_local()) is not None:
        log.debug("messages between stages go through shared memory")
        return SharedMemoryTransport(dist.get_rank(), sockets, device, timeout_s)
    log.info("messages between stages use gloo: several hosts, mixed devices, or no shared memory")
    staging = HostStaging(device) if host_staging.needs_staging(device) else None
    return ProcessGroupTransport(TransportGroups.create("gloo"), device, staging=staging)
