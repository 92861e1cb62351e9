"""All transports keep one contract."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import transport_contract as contract
from helpers.workers import WorkerPool

from lightning_gpp.runtime.processes.rank_sockets import connect_hosts
from lightning_gpp.runtime.transport.host_staging import HostStaging
from lightning_gpp.runtime.transport.open_transport import open_transport
from lightning_gpp.runtime.transport.process_transport import ProcessGroupTransport, TransportGroups
from lightning_gpp.runtime.transport.shared_memory_transport import SharedMemoryTransport
from lightning_gpp.runtime.transport.thread_transport import ThreadHub
from lightning_gpp.runtime.transport.transport import Transport, TransportError


def on_threads(*bodies: Callable[[Transport], None]) -> None:
    hub = ThreadHub(len(bodies))
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            bodies[rank](hub.transport(rank))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize(
    "check", [*contract.CHECKS, contract.abort_wakes_the_waiting], ids=lambda f: f.__name__
)
def test_threads(check):
    on_threads(check, check)


def test_thread_that_closes_is_missed():
    def leave(transport: Transport) -> None:
        transport.close()

    def wait(transport: Transport) -> None:
        with pytest.raises(TransportError, match="rank 0 has gone"):
            contract.receive(transport, (0, 1, 0, 0))

    on_threads(leave, wait)


def shared_memory(timeout_s: float = 10) -> SharedMemoryTransport:
    transport = open_transport(torch.device("cpu"), timeout_s)
    assert isinstance(transport, SharedMemoryTransport)
    return transport


def run_contract_on_processes() -> None:
    dist.init_process_group("gloo")
    transport: Transport = shared_memory()
    check_contract(transport)
    transport.close()
    transport = ProcessGroupTransport(TransportGroups.create("gloo"), torch.device("cpu"))
    check_contract(transport)
    transport.close()
    # Small messages over sockets, as between hosts.
    transport = ProcessGroupTransport(
        TransportGroups.create("gloo"), torch.device("cpu"), sockets=connect_hosts("localhost")
    )
    check_contract(transport)
    transport.close()
    # A payload group of its own per direction, as NCCL needs.
    groups = TransportGroups(
        headers=dist.new_group(backend="gloo"),
        upward=dist.new_group(backend="gloo"),
        downward=dist.new_group(backend="gloo"),
    )
    transport = ProcessGroupTransport(groups, torch.device("cpu"))
    check_contract(transport)
    transport.close()
    # One rank copies through host memory, as one with a GPU among CPUs does.
    staging = HostStaging(torch.device("cpu")) if dist.get_rank() == 0 else None
    transport = ProcessGroupTransport(
        TransportGroups.create("gloo"), torch.device("cpu"), staging=staging
    )
    check_contract(transport)
    transport.close()


def check_contract(transport: Transport) -> None:
    with pytest.raises(ValueError, match="to itself"):
        transport.send(contract.pack([]), target=dist.get_rank(), tag=(0, 0, 0, 0))
    for check in contract.CHECKS:
        check(transport)
    dist.barrier()


def test_processes(pool: WorkerPool):
    pool.run(run_contract_on_processes, num_ranks=2)


def run_abort_on_processes() -> None:
    dist.init_process_group("gloo")
    for transport in (
        shared_memory(),
        ProcessGroupTransport(TransportGroups.create("gloo"), torch.device("cpu")),
        ProcessGroupTransport(
            TransportGroups.create("gloo"), torch.device("cpu"), sockets=connect_hosts("localhost")
        ),
    ):
        contract.abort_wakes_the_waiting(transport)
        dist.barrier()
        transport.close()


def test_processes_abort(pool: WorkerPool):
    pool.run(run_abort_on_processes, num_ranks=2)
