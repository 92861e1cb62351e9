"""Messages between GPUs and what a GPU computes do not wait for each other.

Shown by the order of events, not by times: a stream is held, and what must not depend on it ends.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from helpers import transport_contract as contract
from helpers.workers import WorkerPool

from lightning_gpp.common.torch_device import synchronize
from lightning_gpp.runtime.payload import pack, unpack
from lightning_gpp.runtime.processes.groups import meet
from lightning_gpp.runtime.transport.process_transport import ProcessTransport

TAG = (0, 1, 0, 0)
BIG = 100_000
"""Numbers of a message that goes over NCCL."""


def opened() -> tuple[ProcessTransport, torch.device]:
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=100))
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    transport = ProcessTransport(device, None, 30.0)
    transport.connect([(0, 1), (1, 0)])
    return transport, device


def compute_while_a_message_is_due() -> None:
    """Rank 0 has told of a message whose data it still computes."""
    from standin_gpus.streams import held

    transport, device = opened()
    data = torch.ones(BIG, device=device)
    meet()
    if transport.rank == 0:
        with held(device):
            transport.send(pack([data + 1]), target=1, tag=TAG)
            meet()  # sent, as far as the host goes
            meet()  # rank 1 has computed
        transport.flush()
    else:
        meet()
        assert (data + 1).sum().item() == 2 * BIG
        meet()
        (received,) = unpack(contract.receive(transport, TAG))
        assert received.sum().item() == 2 * BIG
    meet()
    transport.close()


def send_while_the_receiver_computes() -> None:
    """Rank 1 has queued work that does not end."""
    from standin_gpus.streams import held

    transport, device = opened()
    data = torch.ones(BIG, device=device)
    torch.cuda.synchronize(device)
    meet()
    if transport.rank == 0:
        transport.send(pack([data]), target=1, tag=TAG)
        transport.flush()
        torch.cuda.synchronize(device)
        meet()  # it has arrived
    else:
        with held(device):
            doubled = data * 2
            meet()
        (received,) = unpack(contract.receive(transport, TAG))
        assert torch.equal(received + data, doubled)
    meet()
    transport.close()


def wait_while_another_stream_is_held() -> None:
    """As where a sum of gradients waits for a rank that waits for this one."""
    from standin_gpus.streams import held

    device = torch.device("cuda:0")
    own, other = torch.cuda.default_stream(device), torch.cuda.Stream(device)
    with torch.cuda.stream(other), held(device), torch.cuda.stream(own):
        torch.ones(BIG, device=device).add_(1)
        synchronize(device)  # as after every action that is recorded
        torch.cuda.get_rng_state(device)  # as where a forward is repeated


def test_a_rank_waits_for_its_own_stream_only(gpus: WorkerPool) -> None:
    gpus.run(wait_while_another_stream_is_held, num_ranks=1)


def test_compute_does_not_wait_for_a_message(gpus: WorkerPool) -> None:
    gpus.run(compute_while_a_message_is_due, num_ranks=2)


def test_a_message_does_not_wait_for_compute(gpus: WorkerPool) -> None:
    gpus.run(send_while_the_receiver_computes, num_ranks=2)
