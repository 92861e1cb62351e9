"""Which transport joins the processes."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from lightning_gpp.runtime.processes.rank_devices import (
    Wire,
    choose_wire,
    device_backend,
    gather_rank_devices,
)
from lightning_gpp.runtime.processes.rank_sockets import connect_hosts, connect_local
from lightning_gpp.runtime.transport.process_transport import ProcessGroupTransport, TransportGroups
from lightning_gpp.runtime.transport.shared_memory_transport import SharedMemoryTransport

log = logging.getLogger(__name__)


def open_transport(
    device: torch.device, timeout_s: float, host: str = "localhost"
) -> SharedMemoryTransport | ProcessGroupTransport:
    """All ranks: shared memory between CPUs of one host, NCCL between GPUs, otherwise gloo.

    Args:
        device: where this rank's stages run.
        timeout_s: limit of waits for peers that take no messages.
        host: of rank 0.
    """
    wire = choose_wire(gather_rank_devices(device))
    if wire is Wire.SHARED_MEMORY and (sockets := connect_local()) is not None:
        log.debug("messages between stages go through shared memory")
        return SharedMemoryTransport(dist.get_rank(), sockets, timeout_s)
    backend = device_backend(device) if wire is Wire.DEVICES else "gloo"
    sockets = connect_hosts(host)
    log.info(
        "messages between stages go through %s (several hosts, GPUs, or no shared memory), small "
        "ones %s",
        backend,
        "over TCP" if sockets else "through gloo, as ranks cannot connect to each other over TCP",
    )
    return ProcessGroupTransport(
        TransportGroups.create(backend, timeout_s),
        device,
        sockets=sockets,
        timeout_s=timeout_s,
    )
