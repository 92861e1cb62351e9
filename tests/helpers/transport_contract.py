"""What every transport must do, as functions that each rank of a pair runs.

The thread transport runs them on threads, the others on processes.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gpp.runtime.payload import (
    Payload,
    pack,
    pack_gradients,
    pack_object,
    unpack,
)
from lightning_gpp.runtime.transport.transport import FIRST_BYTES, Transport
from lightning_gpp.runtime.waits import TransportError

LIMIT_S = 100.0


def receive(transport: Transport, tag: tuple[int, int, int, int], source: int = 0) -> Payload:
    return transport.receive(source=source, tag=tag, timeout_s=LIMIT_S, purpose="contract")


def keeps_order_within_a_tag(transport: Transport) -> None:
    tag = (0, 1, 0, 0)
    if transport.rank == 0:
        for number in range(20):
            transport.send(pack([torch.full((3,), float(number))]), target=1, tag=tag)
        transport.flush()
    else:
        got = [unpack(receive(transport, tag))[0][0].item() for _ in range(20)]
        assert got == [float(number) for number in range(20)]


def tags_can_be_received_in_any_order(transport: Transport) -> None:
    if transport.rank == 0:
        for index in range(4):
            transport.send(pack([torch.tensor(index)]), target=1, tag=(0, 1, 0, index))
        transport.flush()
    else:
        for index in (2, 0, 3, 1):
            assert unpack(receive(transport, (0, 1, 0, index)))[0].item() == index


def both_may_send_first(transport: Transport) -> None:
    peer = 1 - transport.rank
    large = torch.full((1 << 20,), float(transport.rank))
    for index in range(3):
        transport.send(pack([large]), target=peer, tag=(transport.rank, peer, 0, index))
    for index in range(3):
        payload = receive(transport, (peer, transport.rank, 0, index), source=peer)
        assert unpack(payload)[0].sum().item() == peer * (1 << 20)
    transport.flush()


def shapes_types_and_structures_vary(transport: Transport) -> None:
    tag = (0, 1, 0, 0)
    messages = [
        [torch.arange(6).reshape(2, 3), torch.tensor(True)],
        [torch.zeros(0, 4), torch.randn(2, 1, 2, dtype=torch.float64)],
        [torch.ones(5, dtype=torch.bfloat16).expand(3, 5).t()],
        [{"a": torch.ones(2), "n": 7}, (torch.zeros(1), None), "text"],
        [torch.tensor([1 + 2j]), torch.tensor([[3], [4]], dtype=torch.int16).t()],
        [torch.arange(6).reshape(2, 3)[:1, 1]],  # contiguous, of stride 3
        [torch.randn([1] * 9) for _ in range(12)],
        [torch.randn([1] * 9) for _ in range(2000)],
        [torch.ones(4096), torch.ones(1), "a large message"],
    ]
    sizes = [(count, dims) for count in range(0, 400, 8) for dims in range(1, 12)]
    messages += [[torch.ones([1] * dims + [count])] for count, dims in sizes]
    torch.manual_seed(0)
    if transport.rank == 0:
        for values in messages:
            transport.send(pack(values), target=1, tag=tag)
        transport.flush()
        return
    first = unpack(receive(transport, tag))
    assert first[0].tolist() == [[0, 1, 2], [3, 4, 5]] and first[1].item() is True
    empty, double = unpack(receive(transport, tag))
    assert empty.shape == (0, 4) and double.dtype == torch.float64 and double.shape == (2, 1, 2)
    (half,) = unpack(receive(transport, tag))
    assert half.dtype == torch.bfloat16 and half.shape == (5, 3) and half.float().sum() == 15
    nested = unpack(receive(transport, tag))
    assert nested[0]["n"] == 7 and nested[0]["a"].tolist() == [1, 1]
    assert nested[1][1] is None and nested[2] == "text"
    complex_number, short = unpack(receive(transport, tag))
    assert complex_number.item() == 1 + 2j
    assert short.dtype == torch.int16 and short.tolist() == [[3, 4]]
    assert unpack(receive(transport, tag))[0].tolist() == [1]
    many = unpack(receive(transport, tag))
    assert [tensor.shape for tensor in many] == [torch.Size([1] * 9)] * 12
    assert len(unpack(receive(transport, tag))) == 2000
    large = unpack(receive(transport, tag))
    assert large[0].sum() == 4096 and large[1:] == [torch.ones(1), "a large message"]
    for count, dims in sizes:  # head and data of all lengths, small enough for one piece or not
        (ones,) = unpack(receive(transport, tag))
        assert ones.shape == (*[1] * dims, count) and ones.sum() == count


def heads_may_be_large(transport: Transport) -> None:
    """Larger than a first part, with tensors in the body or after it, and other messages around."""
    tag = (0, 1, 0, 0)
    for num_letters in (FIRST_BYTES, 1 << 20):
        for num_numbers in (0, 3, FIRST_BYTES):
            numbers, flag = torch.arange(num_numbers), torch.tensor([True])
            if transport.rank == 0:
                transport.send(pack(["a" * num_letters, numbers, flag, 7]), target=1, tag=tag)
                transport.send(pack([torch.ones(2)]), target=1, tag=tag)
                transport.flush()
                continue
            text, received, received_flag, last = unpack(receive(transport, tag))
            assert (text, last) == ("a" * num_letters, 7)
            assert torch.equal(received, numbers) and torch.equal(received_flag, flag)
            assert unpack(receive(transport, tag))[0].tolist() == [1, 1]


def gradient_flags_and_gaps_survive(transport: Transport) -> None:
    if transport.rank == 0:
        values = [torch.ones(2, requires_grad=True) * 2, torch.ones(2)]
        transport.send(pack(values), target=1, tag=(0, 1, 0, 0))
        transport.send(pack_gradients([None, torch.ones(3)]), target=1, tag=(0, 1, 1, 0))
        transport.send(pack_object({"any": "thing"}), target=1, tag=(0, 1, 2, 0))
        transport.flush()
    else:
        wanted, plain = unpack(receive(transport, (0, 1, 0, 0)))
        assert wanted.requires_grad and wanted.is_leaf and not plain.requires_grad
        missing, present = receive(transport, (0, 1, 1, 0)).settle().tensors
        assert missing is None and present is not None and present.tolist() == [1, 1, 1]
        assert unpack(receive(transport, (0, 1, 2, 0))) == {"any": "thing"}


def sends_never_wait_for_the_receiver(transport: Transport) -> None:
    """More messages than any buffer of the system holds, on their way before one is taken."""
    if transport.rank == 0:
        for index in range(3000):
            transport.send(pack([torch.full((8,), index)]), target=1, tag=(0, 1, 0, 0))
        transport.send(pack([torch.ones(1)]), target=1, tag=(0, 1, 1, 0))
        transport.flush()
    else:
        assert unpack(receive(transport, (0, 1, 1, 0)))[0].item() == 1
        for index in range(3000):
            assert unpack(receive(transport, (0, 1, 0, 0)))[0][-1].item() == index


def received_tensors_stay_as_they_came(transport: Transport) -> None:
    """A tensor that is kept, cut and changed does not see later messages, nor they it."""
    tag = (0, 1, 0, 0)
    if transport.rank == 0:
        sent = torch.zeros(1000)
        for number in range(6):
            transport.flush()
            transport.send(pack([sent.fill_(number).clone()]), target=1, tag=tag)
        transport.flush()
    else:
        kept = []
        for number in range(6):
            row = unpack(receive(transport, tag))[0].view(10, 100)[3]
            assert row.unique().tolist() == [number]
            kept.append(row.add_(10))
        assert [row.unique().tolist() for row in kept] == [[10.0 + n] for n in range(6)]


def sent_tensors_are_let_go(transport: Transport) -> None:
    """Before a flush, too: a step of many micro-batches sends more than it has memory for."""
    tag, count = (0, 1, 0, 0), 12
    if transport.rank == 0:
        sent = []
        for number in range(count):
            memory = np.full(1 << 20, number, dtype=np.float32)
            sent.append(weakref.ref(memory))
            transport.send(pack([torch.from_numpy(memory)]), target=1, tag=tag)
            del memory
        end = time.monotonic() + LIMIT_S
        while sum(each() is not None for each in sent) > count // 2:
            assert time.monotonic() < end, "what was sent is still there"
            time.sleep(0.01)
        transport.flush()
    else:
        for number in range(count):
            assert unpack(receive(transport, tag))[0].unique().tolist() == [number]


def receive_gives_up(transport: Transport) -> None:
    if transport.rank == 1:
        with pytest.raises(TransportError, match=r"stage 7.*rank 0 within 0\.3 s"):
            transport.receive(source=0, tag=(9, 9, 9, 9), timeout_s=0.3, purpose="stage 7")


def abort_wakes_the_waiting(transport: Any) -> None:
    """The last check of a suite: the transport is of no use after it."""
    transport.waits.abort(ValueError("the first error"))
    with pytest.raises(ValueError, match="the first error"):
        transport.receive(source=1 - transport.rank, tag=(9, 9, 9, 9), timeout_s=60, purpose="")


def shapes_without_values_travel(transport: Transport) -> None:
    """Tensors on the ``meta`` device, alone and beside others, far larger than any memory."""
    tag = (0, 1, 0, 0)
    if transport.rank == 0:
        large = torch.empty(1 << 20, 1 << 22, dtype=torch.bfloat16, device="meta")
        transport.send(pack([large.requires_grad_()]), target=1, tag=tag)
        transport.send(pack([large, torch.arange(9000), "text"]), target=1, tag=tag)
        transport.flush()
    else:
        for number in range(2):
            large, *others = unpack(receive(transport, tag))
            assert large.is_meta and large.shape == (1 << 20, 1 << 22)
            assert large.dtype is torch.bfloat16 and large.requires_grad
            assert number == len(others) // 2
        assert torch.equal(others[0], torch.arange(9000)) and others[1] == "text"


CHECKS = (
    keeps_order_within_a_tag,
    tags_can_be_received_in_any_order,
    both_may_send_first,
    shapes_types_and_structures_vary,
    heads_may_be_large,
    gradient_flags_and_gaps_survive,
    sends_never_wait_for_the_receiver,
    received_tensors_stay_as_they_came,
    shapes_without_values_travel,
    sent_tensors_are_let_go,
    receive_gives_up,
)
