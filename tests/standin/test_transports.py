"""Transports between GPUs keep the contract of all transports, and the planes apart."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import transport_contract as contract
from helpers.workers import WorkerPool

from lightning_gpp.runtime.payload import pack, pack_object, unpack
from lightning_gpp.runtime.processes.groups import meet
from lightning_gpp.runtime.transport.process_transport import ProcessTransport

BACKEND = "cpu:gloo,cuda:nccl"


def opened(devices: list[str]) -> tuple[ProcessTransport, torch.device]:
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=100))
    device = torch.device(devices[dist.get_rank()])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    transport = ProcessTransport(device, None, 30.0)
    transport.connect([(0, 1), (1, 0)])
    return transport, device


def run_contract(devices: list[str]) -> None:
    transport, device = opened(devices)
    with device:  # tensors of the checks are made there
        for check in contract.CHECKS:
            check(transport)
    meet_and_close(transport)


def meet_and_close(transport: ProcessTransport) -> None:
    meet()
    transport.close()


def run_planes(devices: list[str]) -> None:
    transport, device = opened(devices)
    rank, tag = transport.rank, (0, 1, 0, 0)
    for size in (0, 3, 100_000):
        here, there = torch.arange(size, dtype=torch.float32), torch.arange(size, device=device)
        if rank == 0:
            transport.send(pack([here, there]), target=1, tag=tag)
            transport.send(pack_object({"far": there, "near": here}), target=1, tag=tag)
            transport.flush()
            continue
        near, far = unpack(contract.receive(transport, tag))
        if devices[0] != "cpu":  # of a CPU all tensors are those of its device
            assert near.device == torch.device("cpu")
        assert far.device == device
        assert torch.equal(far.cpu(), torch.arange(size)) and torch.equal(near.cpu(), here)
        told = unpack(contract.receive(transport, tag))
        assert {each.device.type for each in told.values()} == {"cpu"}
        assert torch.equal(told["far"], torch.arange(size)) and torch.equal(told["near"], here)
    meet_and_close(transport)


WIRES = [["cuda:0", "cuda:1"], ["cuda:0", "cuda:0"], ["cuda:0", "cpu"], ["cpu", "cuda:0"]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("devices", WIRES, ids=" ".join)
def test_the_contract(gpus: WorkerPool, devices: list[str]) -> None:
    gpus.run(run_contract, devices, num_ranks=2)


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("devices", WIRES, ids=" ".join)
def test_tensors_of_the_cpu_stay_there(gpus: WorkerPool, devices: list[str]) -> None:
    gpus.run(run_planes, devices, num_ranks=2)


def run_group() -> None:
    transport, device = opened(["cuda:0", "cuda:1"])
    other = 1 - dist.get_rank()
    sent = torch.full((100_000,), float(dist.get_rank()), device=device)
    received = torch.empty_like(sent)
    send, receive = dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    assert received.eq(other).all()
    meet_and_close(transport)


def test_messages_of_one_group_run_side_by_side(gpus: WorkerPool) -> None:
    """Both ranks send first, as in the 1F1B of ``torch.distributed.pipelining``."""
    gpus.run(run_group, num_ranks=2)
