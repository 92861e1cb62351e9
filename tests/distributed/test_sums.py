"""Both kinds of sums keep the contract: threads of one process, and processes with gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sums_contract as contract
import torch
import torch.distributed as dist
from helpers.threads.start import of_ranks
from helpers.threads.sums import ThreadSumHub, ThreadSums
from helpers.workers import WorkerPool

from lightning_gpp.runtime.sums import ProcessSums


def on_threads(check: Callable[..., Any], num_ranks: int) -> list[Any]:
    hub = ThreadSumHub()
    return of_ranks(num_ranks, lambda rank: check(ThreadSums(hub, rank), rank))


def test_threads():
    for check in contract.CHECKS:
        on_threads(check, 2)
    first, *others = on_threads(contract.equal_bits, 3)
    assert all(torch.equal(first, other) for other in others)
    on_threads(contract.abort_wakes_the_waiting, 2)


def run_contract_on_processes() -> torch.Tensor:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sums = ProcessSums([contract.RANKS, (0, 1, 2)], timeout_s=30)
    if rank in contract.RANKS:
        for check in contract.CHECKS:
            check(sums, rank)
    result = contract.equal_bits(sums, rank)
    sums.close()
    dist.barrier()
    aborted = ProcessSums([contract.RANKS], timeout_s=30)
    if rank in contract.RANKS:
        contract.abort_wakes_the_waiting(aborted, rank)
    dist.barrier()
    return result


def test_processes(pool: WorkerPool):
    first, *others = pool.run(run_contract_on_processes, num_ranks=3)
    assert all(torch.equal(first, other) for other in others)
