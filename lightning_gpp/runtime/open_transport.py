"""Which transport joins the processes."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from lightning_gpp.runtime.local_sockets import connect_local
from lightning_gpp.runtime.process_transport import ProcessGroupTransport, TransportGroups
from lightning_gpp.runtime.shared_memory_transport import SharedMemoryTransport

log = logging.getLogger(__name__)


def open_transport(
    device: torch.device, timeout_s: float
) -> SharedMemoryTransport | ProcessGroupTransport:
    """All ranks: shared memory between CPUs of one host, otherwise gloo or NCCL.

    Args:
        device: where this rank's stages run.
        timeout_s: limit of waits for peers that take no messages.
    """
    if device.type != "cpu":
        return ProcessGroupTransport(TransportGroups.create("nccl"), device)
    sockets = connect_local()
    if sockets is not None:
        log.debug("messages between stages go through shared memory")
        return SharedMemoryTransport(dist.get_rank(), sockets, device, timeout_s)
    log.info("the processes share no memory (several hosts?): messages between stages use gloo")
    return ProcessGroupTransport(TransportGroups.create("gloo"), device)
