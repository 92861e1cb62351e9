"""Messages over ``torch.distributed`` process groups: gloo between CPUs, NCCL between GPUs.

One thread per peer listens all the time and puts what comes into the mailbox, so a posted send
always finds its receiver: no order of sends and receives can deadlock, and transfers overlap with
compute. Small messages go over sockets where there are any (:mod:`.lines`), without that thread.
The first part of a message, on a gloo group, says what it is and holds small data; large tensors
follow on the payload group of their direction. With gloo those of a GPU are staged through
host memory (:mod:`~lightning_gpp.runtime.transport.host_staging`). With NCCL, which matches
messages by order alone, each direction has a group of its own and one thread issues its receives in
the order in which the sender announces them. (No GPU has run either path yet.)
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpp.runtime.payload import Payload
from lightning_gpp.runtime.transport.header import (
    FIRST_BYTES,
    bytes_of_all,
    decode_first,
    encode_first,
    goodbye,
    head_of,
    is_goodbye,
    number_of,
    shapes_that_follow,
)
from lightning_gpp.runtime.transport.host_staging import HostStaging
from lightning_gpp.runtime.transport.lines import TcpLines
from lightning_gpp.runtime.transport.message import (
    TensorHead,
    bytes_to_numbers,
    describe,
    has_data,
    in_one_piece,
    out_of_one_piece,
    piece_bytes,
    to_device,
)
from lightning_gpp.runtime.transport.transport import Mailbox, Tag, TransportError, late

SMALL_BYTES = 1 << 17
"""Messages of tensors on CPUs of up to so many bytes go over sockets."""

_FIRST_TAG, _DATA_TAG = 1, 2
_CLOSED = "it closed its transport"
_LISTEN_TIMEOUT = timedelta(days=30)
_CLOSE_TIMEOUT_S = 30.0
_HANG_UP_TIMEOUT_S = 5.0
_GOODBYE_TIMEOUT = timedelta(seconds=2)


@dataclass(frozen=True, slots=True)
class TransportGroups:
    """The process groups of a transport; all ranks create them together.

    Attributes:
        headers: gloo group for headers and structures.
        upward: payload from lower to higher ranks.
        downward: payload from higher to lower ranks.
    """

    headers: dist.ProcessGroup
    upward: dist.ProcessGroup
    downward: dist.ProcessGroup

    @classmethod
    def create(cls, backend: str = "gloo") -> TransportGroups:
        """New groups over all ranks. ``backend`` moves the payload: ``"gloo"`` or ``"nccl"``."""
        headers = _new_group("gloo")
        if backend == "gloo":
            return cls(headers, headers, headers)
        return cls(headers, _new_group(backend), _new_group(backend))

    def destroy(self) -> None:
        """Gives the groups back."""
        for group in {id(g): g for g in (self.headers, self.upward, self.downward)}.values():
            dist.destroy_process_group(group)


def _new_group(backend: str) -> dist.ProcessGroup:
    group = dist.new_group(backend=backend, timeout=_LISTEN_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return group


@dataclass(slots=True)
class _Posted:
    """A send under way; the tensor must live until it is done."""

    work: dist.Work
    tensor: Tensor = field(repr=False)


class ProcessGroupTransport:
    """A :class:`~lightning_gpp.runtime.transport.transport.Transport` over process groups.

    Args:
        groups: see :meth:`TransportGroups.create`.
        device: where received tensors go.
        staging: copies tensors through host memory, for payload groups that move no other.
        sockets: to the other ranks, for small messages; without them all go over the groups.
        timeout_s: limit of waits for peers that read nothing.

    Attributes:
        rank: this rank.
        num_ranks: ranks in the world.
    """

    def __init__(
        self,
        groups: TransportGroups,
        device: torch.device,
        staging: HostStaging | None = None,
        sockets: Mapping[int, socket.socket] | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self._groups = groups
        self._device = device
        self._staging = staging
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._mailbox = Mailbox()
        self._in_order = _InOrder()
        self._num_sent: Counter[int] = Counter()
        self._timeout_s = timeout_s
        self._lines = TcpLines(sockets or {}, self._take_piece, self._mailbox.lose)
        self._line_bytes = SMALL_BYTES if device.type == "cpu" else FIRST_BYTES
        self._posted: list[_Posted] = []
        self._closing = False
        self._listeners = {
            peer: threading.Thread(
                target=self._listen, args=(peer,), name=f"listen-{peer}", daemon=True
            )
            for peer in range(self.num_ranks)
            if peer != self.rank
        }
        for listener in self._listeners.values():
            listener.start()

    def send(self, payload: Payload, *, target: int, tag: Tag) -> None:
        """Posts the message and returns."""
        if target == self.rank:
            raise ValueError(f"rank {target} sends message {tag} to itself; hand it over locally")
        number = self._num_sent[target]
        self._num_sent[target] += 1
        fixed, shapes = describe(payload, tag)
        num_bytes = piece_bytes(payload, shapes)
        if num_bytes <= self._line_bytes and self._lines.has_room(target, num_bytes):
            self._lines.send(target, in_one_piece(number, payload, fixed, shapes))
            return
        first = encode_first(payload, tag, number)
        self._post(first.part, target, self._groups.headers, _FIRST_TAG)
        if first.holds_data:
            return
        if first.shapes is not None:
            self._post(first.shapes, target, self._groups.headers, _DATA_TAG)
        if payload.structure is not None:
            data = torch.frombuffer(bytearray(payload.structure), dtype=torch.uint8)
            self._post(data, target, self._groups.headers, _DATA_TAG)
        for tensor in payload.tensors:
            if has_data(tensor):
                data = self._staging.to_host(tensor) if self._staging else self._on_the_wire(tensor)
                self._post(data, target, self._payload_group(target), _DATA_TAG)

    def receive(self, *, source: int, tag: Tag, timeout_s: float, purpose: str) -> Payload:
        """Takes in what comes until the message is in the mailbox, where listeners put it, too."""
        deadline = time.monotonic() + timeout_s
        while self._lines.take_in(0):  # what a rank sent before it went counts
            pass
        while (payload := self._mailbox.take(source, tag, purpose)) is None:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise late(source, timeout_s, purpose)
            self._lines.take_in(remaining_s)
        return payload

    def flush(self) -> None:
        """Waits until all posted tensors are on their way out; listeners take them at once."""
        self._lines.flush(self._timeout_s)
        posted, self._posted = self._posted, []
        for send in posted:
            send.work.wait()

    def abort(self, error: BaseException) -> None:
        """Ends the waiting of this rank. Listeners end with their peers or with the process."""
        self._closing = True
        self._mailbox.fail(error)
        self._lines.wake()

    def close(self) -> None:
        """Says goodbye to all peers and waits for theirs."""
        self._closing = True
        for peer in self._listeners:
            self._post_goodbye(peer)
        self._lines.flush(_CLOSE_TIMEOUT_S)
        for peer, listener in self._listeners.items():
            listener.join(_CLOSE_TIMEOUT_S)
            if listener.is_alive():
                raise TransportError(
                    f"closing: rank {peer} did not end its messages within {_CLOSE_TIMEOUT_S:g} s"
                )
        self.flush()
        self._lines.close()
        self._groups.destroy()

    def hang_up(self) -> None:
        """Ends the transport after a failure: says goodbye to who is left, waits a little.

        A rank that has gone closes its connections; one that is left hangs up too. Listeners that
        outlive this would end the process with an abort.
        """
        self._closing = True
        deadline = time.monotonic() + _HANG_UP_TIMEOUT_S
        goodbyes = []
        for peer in self._listeners:
            with contextlib.suppress(RuntimeError):  # a peer that has gone
                self._post_goodbye(peer)
                goodbyes.append(self._posted[-1])
        for posted in goodbyes:  # a send whose handle is dropped is lost
            with contextlib.suppress(RuntimeError):
                posted.work.wait(_GOODBYE_TIMEOUT)
        for listener in self._listeners.values():
            listener.join(max(0.0, deadline - time.monotonic()))
        self._lines.close()

    def _on_the_wire(self, tensor: Tensor) -> Tensor:
        is_nccl = self._groups.upward is not self._groups.headers
        return (tensor.to(self._device) if is_nccl else tensor).contiguous()

    def _payload_group(self, peer: int, *, receiving: bool = False) -> dist.ProcessGroup:
        upward = (peer > self.rank) != receiving
        return self._groups.upward if upward else self._groups.downward

    def _post(self, tensor: Tensor, target: int, group: dist.ProcessGroup, tag: int) -> None:
        work = group.send([tensor], target, tag)  # all ranks are in it: their numbers are the same
        self._posted.append(_Posted(work, tensor))

    def _post_goodbye(self, peer: int) -> None:
        self._post(goodbye(self._num_sent[peer]), peer, self._groups.headers, _FIRST_TAG)

    def _take_piece(self, peer: int, piece: bytearray) -> None:
        """A message has come over a socket."""
        tag, payload = out_of_one_piece(piece)
        payload = to_device(payload, self._device)
        (number,) = bytes_to_numbers(piece, 0, 1)
        self._in_order.put(peer, number, lambda: self._mailbox.put(peer, tag, payload))

    def _take_message(self, peer: int, number: int, tag: Tag, payload: Payload) -> None:
        """A listener has received a message."""
        payload = to_device(payload, self._device)
        self._in_order.put(peer, number, lambda: self._mailbox.put(peer, tag, payload))
        self._lines.wake()

    def _listen(self, peer: int) -> None:
        try:
            first = bytearray(FIRST_BYTES)
            buffer = torch.frombuffer(first, dtype=torch.uint8)
            while True:
                self._receive_into(buffer, peer, self._groups.headers, _FIRST_TAG)
                head = head_of(first)
                number = number_of(head)
                if is_goodbye(head):
                    self._in_order.put(peer, number, lambda: self._mailbox.lose(peer, _CLOSED))
                    self._lines.wake()
                    return
                if num_bytes := bytes_of_all(head):
                    tag, payload = out_of_one_piece(first[:num_bytes])
                else:
                    tag, payload = self._receive_rest(peer, first, head)
                self._take_message(peer, number, tag, payload)
        except RuntimeError as error:
            if not self._closing:
                self._mailbox.lose(peer, str(error).strip().splitlines()[0])
                self._lines.wake()

    def _receive_rest(
        self, peer: int, first: bytearray, head: tuple[int, ...]
    ) -> tuple[Tag, Payload]:
        """A message of which the data follow its first part."""
        shapes = None
        if count := shapes_that_follow(head):
            shapes = torch.empty(count, dtype=torch.int64)
            self._receive_into(shapes, peer, self._groups.headers, _DATA_TAG)
        message, structure = decode_first(first, head, shapes), None
        if message.structure_bytes >= 0:
            data = torch.empty(message.structure_bytes, dtype=torch.uint8)
            self._receive_into(data, peer, self._groups.headers, _DATA_TAG)
            structure = data.numpy().tobytes()
        group = self._payload_group(peer, receiving=True)
        tensors = [self._receive_tensor(each, peer, group) for each in message.tensors]
        flags = [each.requires_grad for each in message.tensors]
        return message.tag, Payload(tensors, flags, structure)

    def _receive_tensor(
        self, head: TensorHead, peer: int, group: dist.ProcessGroup
    ) -> Tensor | None:
        if head.dtype is None:
            return None
        if head.is_meta:
            return torch.empty(head.shape, dtype=head.dtype, device="meta")
        tensor = self._empty(head.shape, head.dtype)
        if tensor.numel():
            self._receive_into(tensor, peer, group, _DATA_TAG)
        return self._staging.to_device(tensor) if self._staging else tensor

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._staging:
            return self._staging.buffer(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _receive_into(self, tensor: Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> None:
        group.recv([tensor], peer, tag).wait()


class _InOrder:
    """What comes on two ways from a rank is handed on in the order in which that rank sent it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: Counter[int] = Counter()
        self._early: dict[tuple[int, int], Callable[[], None]] = {}

    def put(self, source: int, number: int, hand_on: Callable[[], None]) -> None:
        """Something has come; it is handed on at once if all that was sent before has been."""
        with self._lock:
            self._early[source, number] = hand_on
            while (ready := self._early.pop((source, self._next[source]), None)) is not None:
                self._next[source] += 1
                ready()
