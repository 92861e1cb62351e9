"""Messages between two ranks that ``benchmarks/gpu.py`` measures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_cases import Case, Place
from gpu_devices import join, own_device, wait
from torch import Tensor

from lightning_gpp.runtime.payload import pack
from lightning_gpp.runtime.transport.process_transport import ProcessTransport

TIMEOUT_S = 100.0
_TAG = (0, 0, 0, 0)
_UNDER_WAY_BYTES = 256 << 20


class _Pair:
    """Two ranks of which the first sends.

    Args:
        transport: between them.
    """

    def __init__(self, transport: ProcessTransport) -> None:
        self.is_sender = transport.rank == 0
        self._transport = transport
        self._hosts = dist.new_group(backend="gloo")

    def send(self, tensor: Tensor) -> None:
        """Rank 0."""
        self._transport.send(pack([tensor]), target=1, tag=_TAG)

    def receive(self) -> None:
        """Rank 1."""
        self._transport.receive(source=0, tag=_TAG, timeout_s=TIMEOUT_S, purpose="benchmark")

    def meet(self) -> None:
        """Both hosts are here; their devices may be anywhere."""
        dist.barrier(self._hosts)

    def flush(self) -> None:
        """What was sent is on its way."""
        self._transport.flush()

    def finish(self, device: torch.device) -> None:
        """Messages are over on hosts and devices of both."""
        self.flush()
        wait(device)
        self.meet()

    def send_often(self, tensor: Tensor, num: int) -> None:
        """Messages in a row, to their end."""
        for _ in range(num):
            self.send(tensor) if self.is_sender else self.receive()
        self.finish(tensor.device)


@contextmanager
def _connected(place: Place, device: torch.device) -> Iterator[_Pair]:
    join(place)
    transport = ProcessTransport(device, None, TIMEOUT_S)
    yield _Pair(transport)
    transport.close()


def messages(place: Place, case: Case, folder: Path) -> dict[str, Any]:
    """Messages per second from rank 0 to rank 1; the option ``sizes_bytes``."""
    device, per_s = own_device(place), {}
    with _connected(place, device) as pair:
        for size_bytes in case.options["sizes_bytes"]:
            tensor = torch.ones(size_bytes // 4, device=device)
            num, rounds = max(1, min(100, _UNDER_WAY_BYTES // size_bytes)), 5
            pair.send_often(tensor, num)
            start_s = time.perf_counter()
            for _ in range(rounds):
                pair.send_often(tensor, num)
            per_s[str(size_bytes)] = rounds * num / (time.perf_counter() - start_s)
    return per_s


def overlap(place: Place, case: Case, folder: Path) -> dict[str, Any]:
    """Whether messages wait for compute that they have nothing to do with, and it for them.

    The option ``side`` is that of the matrices that keep a device busy for a second. Seconds:

    - ``send_s``: rank 0 sends what its device has yet to compute;
    - ``other_work_s``: rank 1, to which that message is announced, adds to a vector and reads it;
    - ``message_s``: rank 0 sends data that is there, and its device is done with it, while rank
      1's device is busy with something else.
    """
    device = own_device(place)
    matrix = torch.randn(case.options["side"], case.options["side"], device=device)
    matrix /= case.options["side"]
    vector = torch.ones(1 << 16, device=device)  # more than travels inside of an announcement

    def work(num: int) -> Tensor:
        found = matrix
        for _ in range(num):
            found = found @ matrix
        return found

    def seconds(num: int) -> float:
        wait(device)
        start_s = time.perf_counter()
        work(num)
        wait(device)
        return time.perf_counter() - start_s

    with _connected(place, device) as pair:
        pair.send_often(vector, 10)  # connects
        (vector + 1).sum().item()
        for is_turn in (pair.is_sender, not pair.is_sender):  # both may be on one device
            if is_turn:
                seconds(2)
                num = max(2, min(500, round(2 / seconds(2))))  # a device queues a thousand
                alone_s = seconds(num)
            pair.meet()

        if pair.is_sender:
            late = work(num).flatten()[: vector.numel()]
        start_s = time.perf_counter()
        if pair.is_sender:
            pair.send(late)
        send_s = time.perf_counter() - start_s
        pair.meet()
        time.sleep(0.1)  # it may be on its way to the thread that listens
        start_s = time.perf_counter()
        (vector + 1).sum().item()
        other_work_s = time.perf_counter() - start_s
        if not pair.is_sender:
            pair.receive()
        pair.finish(device)

        if not pair.is_sender:
            work(num)
        pair.meet()
        start_s = time.perf_counter()
        if pair.is_sender:
            pair.send(vector)
            pair.flush()
            wait(device)
        message_s = time.perf_counter() - start_s
        if not pair.is_sender:
            pair.receive()
        pair.finish(device)
    return {
        "alone_s": alone_s,
        "send_s": send_s,
        "other_work_s": other_work_s,
        "message_s": message_s,
    }
