"""All transports keep one contract."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from helpers import transport_contract as contract
from helpers.host_copies import HostCopies
from helpers.threads.start import of_ranks
from helpers.threads.transport import ThreadHub
from helpers.workers import WorkerPool

from lightning_gpp.runtime.payload import pack
from lightning_gpp.runtime.transport.process_transport import ProcessTransport
from lightning_gpp.runtime.transport.transport import Transport
from lightning_gpp.runtime.waits import TransportError


def on_threads(*bodies: Callable[[Transport], None]) -> None:
    hub = ThreadHub(len(bodies))
    of_ranks(len(bodies), lambda rank: bodies[rank](hub.transport(rank)))


@pytest.mark.parametrize(
    "check", [*contract.CHECKS, contract.abort_wakes_the_waiting], ids=lambda f: f.__name__
)
def test_threads(check):
    on_threads(check, check)


def test_thread_that_closes_is_missed():
    def leave(transport: Transport) -> None:
        transport.close()

    def wait(transport: Transport) -> None:
        with pytest.raises(TransportError, match="rank 0 has ended"):
            contract.receive(transport, (0, 1, 0, 0))

    on_threads(leave, wait)


def send_to_a_stopped_rank(timeout_s: float, abort_after_s: float | None) -> str:
    """Rank 0's error of a flush while rank 1 reads nothing."""
    dist.init_process_group("gloo")
    transport = ProcessTransport(torch.device("cpu"), timeout_s=timeout_s)
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    text = ""
    if transport.rank == 0:
        if abort_after_s is not None:
            error = RuntimeError("rank 1 failed")
            threading.Timer(abort_after_s, transport.waits.abort, [error]).start()
        os.kill(pids[1], signal.SIGSTOP)
        try:
            transport.send(pack([torch.zeros(1 << 24)]), target=1, tag=(0, 1, 0, 0))
            transport.flush()
        except RuntimeError as error:
            text = str(error)
        finally:
            os.kill(pids[1], signal.SIGCONT)
    transport.hang_up()
    return text


def test_a_flush_has_a_limit_and_names_the_rank(pool: WorkerPool) -> None:
    text, _ = pool.run(send_to_a_stopped_rank, 1.0, None, num_ranks=2)
    assert text.startswith("sending: rank 1 took no messages within 1 s; raise `timeout`")


def test_an_error_of_another_rank_ends_a_flush(pool: WorkerPool) -> None:
    text, _ = pool.run(send_to_a_stopped_rank, 600.0, 0.5, num_ranks=2)
    assert text == "rank 1 failed"


def run_contract_on_processes() -> None:
    dist.init_process_group("gloo")
    transport = ProcessTransport(torch.device("cpu"), None, 100.0)
    check_contract(transport)
    transport.close()
    # Rank 1 copies through host memory, as one with a GPU among CPUs does.
    transport = ProcessTransport(torch.device("cpu"))
    if transport.rank == 1:
        transport._copies = HostCopies(0.001)
    check_contract(transport)
    transport.close()


def meets_a_peer_that_reads_nothing(transport: Transport) -> None:
    """More than all buffers hold leaves while the other rank is in a collective."""
    sizes = [25_000, 16, 25_000] * 30 + [500_000]
    if transport.rank == 0:
        for number, size in enumerate(sizes):
            values = contract.pack([torch.full((size,), float(number))])  # 100 kB
            transport.send(values, target=1, tag=(0, 1, 0, 0))
        transport.flush()
    dist.barrier()
    if transport.rank == 1:
        for number, size in enumerate(sizes):
            (got,) = contract.unpack(contract.receive(transport, (0, 1, 0, 0)))
            assert got.shape == (size,)
            assert got[0] == got[-1] == number


def run_on_a_peer_that_reads_nothing() -> None:
    dist.init_process_group("gloo")
    transport = ProcessTransport(torch.device("cpu"), timeout_s=100.0)
    meets_a_peer_that_reads_nothing(transport)
    dist.barrier()
    transport.close()


def test_processes_whose_peer_reads_nothing(pool: WorkerPool):
    pool.run(run_on_a_peer_that_reads_nothing, num_ranks=2)


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
    transport = ProcessTransport(torch.device("cpu"))
    contract.abort_wakes_the_waiting(transport)
    dist.barrier()
    transport.close()


def test_processes_abort(pool: WorkerPool):
    pool.run(run_abort_on_processes, num_ranks=2)
