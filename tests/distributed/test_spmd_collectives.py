"""Both kinds of collectives keep the contract: threads of one process, and processes with gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import collectives_contract as contract
import pytest
import torch
import torch.distributed as dist
from helpers.threads.collectives import ThreadCollectiveHub, ThreadCollectives
from helpers.threads.start import of_ranks
from helpers.workers import WorkerPool

from lightning_gpp.runtime.collectives import ProcessCollectives
from lightning_gpp.runtime.waits import TransportError

CPU = torch.device("cpu")


def on_threads(check: Callable[..., Any], num_ranks: int, limit_s: float = 10.0) -> list[Any]:
    hub = ThreadCollectiveHub(num_ranks, limit_s)
    return of_ranks(num_ranks, lambda rank: check(ThreadCollectives(hub, rank), rank))


def test_threads() -> None:
    for check in contract.CHECKS:
        on_threads(check, 3)
    first, *others = on_threads(contract.sums_have_the_same_bits, 3)
    assert all(torch.equal(first, other) for other in others)
    on_threads(contract.a_wait_ends_after_its_time, 3, limit_s=1.0)
    on_threads(contract.abort_wakes_the_waiting, 3)


def test_threads_that_do_different_things_are_told() -> None:
    def run(group: ThreadCollectives, rank: int) -> None:
        size = 2 + rank
        group.begin_all_reduce(torch.ones(size), purpose="sum of x")()

    with pytest.raises(TransportError, match=r"sum of x: ranks do different .*\(2,\).*\(3,\)"):
        on_threads(run, 2)


def run_contract_on_processes() -> torch.Tensor:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = ProcessCollectives(30.0, CPU)
    for check in contract.CHECKS:
        check(group, rank)
    result = contract.sums_have_the_same_bits(group, rank)
    group.close()
    dist.barrier()
    contract.abort_wakes_the_waiting(ProcessCollectives(30.0, CPU), rank)
    dist.barrier()
    contract.a_wait_ends_after_its_time(ProcessCollectives(1.0, CPU), rank)
    dist.barrier()
    return result


def test_processes(pool: WorkerPool) -> None:
    first, *others = pool.run(run_contract_on_processes, num_ranks=3)
    assert all(torch.equal(first, other) for other in others)
