"""Messages over ``torch.distributed`` process groups: gloo between CPUs, NCCL between GPUs.

One thread per peer listens all the time and puts what comes into the mailbox, so a posted send
always finds its receiver: no order of sends and receives can deadlock, and transfers overlap with
compute. Small messages go over sockets where there are any (:mod:`.lines`), without that thread.
The first part of a message, on a gloo group, says what it is and holds small data; large tensors
follow. Tensors on the CPU stay on gloo and on the CPU; those on GPUs take the *payload* way:

- NCCL matches messages by order alone. Each direction between two ranks has a communicator of its
  own, and the listener issues the receive when the sender announces that its send is queued. So all
  that a message waits for on any GPU was queued before its receive, and the GPUs' queues, in
  whichever order they share hardware, cannot wait for each other in a circle.
- Otherwise tensors are staged through pinned host memory: a thread per peer sends them once their
  copy is complete.

Neither way makes the host wait for the device, nor the stream that computes: what comes is written
on streams of their own, and who uses it waits for its :class:`~lightning_gpp.runtime.arrival`.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpp.common.torch_device import is_accelerator, set_current, synchronize
from lightning_gpp.runtime.arrival import Arrival
from lightning_gpp.runtime.payload import Payload
from lightning_gpp.runtime.processes.device_group import abort_group
from lightning_gpp.runtime.processes.work_waits import WorkWaits
from lightning_gpp.runtime.transport.device_copies import DeviceCopies, SideStream
from lightning_gpp.runtime.transport.header import (
    FIRST_BYTES,
    FirstPart,
    bytes_of_all,
    decode_first,
    encode_first,
    goodbye,
    head_of,
    is_goodbye,
    number_of,
    shapes_that_follow,
)
from lightning_gpp.runtime.transport.lines import TcpLines
from lightning_gpp.runtime.transport.message import (
    Description,
    TensorHead,
    bytes_to_numbers,
    describe,
    has_data,
    in_one_piece,
    out_of_one_piece,
    piece_bytes,
)
from lightning_gpp.runtime.transport.transport import Mailbox, Tag, TransportError, late, not_taken

SMALL_BYTES = 1 << 17
"""Messages of tensors on CPUs of up to so many bytes go over sockets."""

_FIRST_TAG, _DATA_TAG = 1, 2
_CLOSED = "it closed its transport"
_LISTEN_TIMEOUT = timedelta(days=30)
"""Of the group that waits for the next message, which comes when the user's code is done."""
_CLOSE_TIMEOUT_S = 30.0
_HANG_UP_TIMEOUT_S = 5.0
_LATER_S = 5.0
"""The wait of gloo ends after the one of the rank, whose error says more."""
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
    def create(cls, backend: str = "gloo", timeout_s: float = 1800.0) -> TransportGroups:
        """New groups over all ranks.

        Args:
            backend: of the payload: ``"gloo"``, or that of a device (``"nccl"``).
            timeout_s: limit of a payload on its way, once it is announced.
        """
        headers = _new_group("gloo", _LISTEN_TIMEOUT)
        if backend == "gloo":
            return cls(headers, headers, headers)
        limit = timedelta(seconds=timeout_s)
        return cls(headers, _new_group(backend, limit), _new_group(backend, limit))

    @property
    def is_staged(self) -> bool:
        """Whether payload takes the way of the headers, which moves memory of CPUs only."""
        return self.upward is self.headers

    def payload(self, source: int, target: int) -> dist.ProcessGroup:
        """The group for tensors of devices from one rank to another."""
        return self.upward if target > source else self.downward

    def abort(self) -> None:
        """Ends what waits on devices for ranks that are gone."""
        if not self.is_staged:
            for group in (self.upward, self.downward):
                abort_group(group)

    def destroy(self) -> None:
        """Gives the groups back."""
        for group in {id(g): g for g in (self.headers, self.upward, self.downward)}.values():
            dist.destroy_process_group(group)


def _new_group(backend: str, timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend=backend, timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


@dataclass(slots=True)
class _Posted:
    """A send under way; the tensor must live until it is done."""

    work: dist.Work
    tensor: Tensor = field(repr=False)
    target: int


class ProcessGroupTransport:
    """A :class:`~lightning_gpp.runtime.transport.transport.Transport` over process groups.

    Args:
        groups: see :meth:`TransportGroups.create`.
        device: where received tensors go.
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
        sockets: Mapping[int, socket.socket] | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self._groups = groups
        self._device = device
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._on_cpu = not is_accelerator(device)
        is_staged = groups.is_staged and not self._on_cpu and self.num_ranks > 1
        self._copies = DeviceCopies(device) if is_staged else None
        self._mailbox = Mailbox()
        self._in_order = _InOrder()
        self._num_sent: Counter[int] = Counter()
        self._timeout_s = timeout_s
        self._lines = TcpLines(sockets or {}, self._take_piece, self._mailbox.lose)
        self._posting = threading.Lock()
        self._posted: list[_Posted] = []
        self._waits, self._sent_waits = WorkWaits(), _SentWaits()
        self._closing = False
        peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
        self._listeners = {
            peer: threading.Thread(
                target=self._listen, args=(peer,), name=f"listen-{peer}", daemon=True
            )
            for peer in peers
        }
        self._senders = {peer: _StagedSends(self, peer) for peer in peers if self._copies}
        for listener in self._listeners.values():
            listener.start()

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """All ranks: makes the communicators of ranks that will exchange tensors of devices.

        NCCL makes them at the first message of a pair and direction, which both ranks then wait
        for. Here they do so in one order, before anything else is queued.

        Args:
            pairs: of ranks; the same on all of them.
        """
        if self._groups.is_staged:
            return
        token = torch.zeros(1, device=self._device)
        for source, target in sorted(set(pairs)):
            group = self._groups.payload(source, target)
            if self.rank == source:
                group.send([token], target, _DATA_TAG).wait()
            elif self.rank == target:
                group.recv([token], source, _DATA_TAG).wait()
        synchronize(self._device)

    def send(self, payload: Payload, *, target: int, tag: Tag) -> None:
        """Posts the message and returns."""
        if target == self.rank:
            raise ValueError(f"rank {target} sends message {tag} to itself; hand it over locally")
        number = self._num_sent[target]
        self._num_sent[target] += 1
        fixed, shapes = describe(payload, tag, on_cpu=self._on_cpu)
        far = [t for t in payload.tensors if has_data(t) and t.device.type != "cpu"]
        num_bytes = piece_bytes(payload, shapes)
        if not far and num_bytes <= SMALL_BYTES and self._lines.has_room(target, num_bytes):
            self._lines.send(target, in_one_piece(number, payload, fixed, shapes))
            return
        first = encode_first(payload, fixed, shapes, number, is_far=bool(far))
        message = _Message(first, payload.structure, [t for t in payload.tensors if has_data(t)])
        if far and self._copies:
            hosts, copied = self._copies.to_host(far)
            on_host = iter(hosts)
            message.tensors = [
                t if t.device.type == "cpu" else next(on_host) for t in message.tensors
            ]
            self._senders[target].put(message, copied)
        else:
            self._posted += self._post_message(message, target)

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
        """Waits until all posted tensors are on their way out; listeners take them at once.

        Of tensors on a device this thread's stream waits for that, not the host.
        """
        self._lines.flush(self._timeout_s, self._mailbox.check)
        if near := self._let_change():
            late = not_taken((send.target for send in near), self._timeout_s)
            sent = self._sent_waits.begin(near, self._timeout_s + _LATER_S)
            self._waits.result(sent, self._timeout_s, late=late, failed="a send failed")

    def _let_change(self) -> list[_Posted]:
        """This thread's stream waits for what was posted of it; returns what the host waits for."""
        for sender in self._senders.values():
            sender.let_change()
        posted, self._posted = self._posted, []
        for send in posted:
            if send.tensor.device.type != "cpu":
                send.work.wait()
        return [send for send in posted if send.tensor.device.type == "cpu"]

    def abort(self, error: BaseException) -> None:
        """Ends the waiting of this rank. Listeners end with their peers or with the process."""
        self._closing = True
        self._mailbox.fail(error)
        self._waits.abort(error)
        self._lines.wake()
        self._groups.abort()

    def close(self) -> None:
        """Says goodbye to all peers and waits for theirs."""
        self._closing = True
        for sender in self._senders.values():
            sender.end(_CLOSE_TIMEOUT_S)
        for peer in self._listeners:
            self._post_goodbye(peer)
        self._lines.flush(_CLOSE_TIMEOUT_S, lambda: None)  # errors that ended waits do not end this
        for peer, listener in self._listeners.items():
            listener.join(_CLOSE_TIMEOUT_S)
            if listener.is_alive():
                raise TransportError(
                    f"closing: rank {peer} did not end its messages within {_CLOSE_TIMEOUT_S:g} s"
                )
        for send in self._let_change():
            _wait(send, _CLOSE_TIMEOUT_S)
        self._lines.close()
        self._sent_waits.end()
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
        self._sent_waits.end()

    def post_and_wait(self, message: _Message, target: int) -> None:
        """Sends a message whose tensors are in host memory; for the thread of a peer."""
        for send in self._post_message(message, target):
            _wait(send, self._timeout_s)

    def lose(self, peer: int, error: RuntimeError) -> None:
        """A peer takes no more messages."""
        if not self._closing:
            self._mailbox.lose(peer, str(error).strip().splitlines()[0])
            self._lines.wake()

    def _post_message(self, message: _Message, target: int) -> list[_Posted]:
        """Posts the parts of a message, between which no other may come."""
        with self._posting:
            headers = self._groups.headers
            posted = [self._post(message.first.part, target, headers, _FIRST_TAG)]
            if message.first.holds_data:
                return posted
            parts = [] if message.first.shapes is None else [message.first.shapes]
            if message.structure:
                parts.append(torch.frombuffer(bytearray(message.structure), dtype=torch.uint8))
            for tensor in (*parts, *(tensor.contiguous() for tensor in message.tensors)):
                is_far = tensor.device.type != "cpu"
                group = self._groups.payload(self.rank, target) if is_far else headers
                posted.append(self._post(tensor, target, group, _DATA_TAG))
            return posted

    def _post(self, tensor: Tensor, target: int, group: dist.ProcessGroup, tag: int) -> _Posted:
        # All ranks are in the group: their numbers are the same.
        return _Posted(group.send([tensor], target, tag), tensor, target)

    def _post_goodbye(self, peer: int) -> None:
        part = goodbye(self._num_sent[peer])
        self._posted.append(self._post(part, peer, self._groups.headers, _FIRST_TAG))

    # What comes ------------------------------------------------------------------------------

    def _take_piece(self, peer: int, piece: bytearray) -> None:
        """A message has come over a socket."""
        description, payload = out_of_one_piece(piece)
        (number,) = bytes_to_numbers(piece, 0, 1)
        self._put(peer, number, description, payload)

    def _put(self, peer: int, number: int, description: Description, payload: Payload) -> None:
        """Hands a message on whose tensors are where they came; they may belong on the device."""
        if self._copies:
            places = [
                place
                for place, head in enumerate(description.tensors)
                if head.is_on_device and not head.is_meta
            ]
            found = [t for place in places if (t := payload.tensors[place]) is not None]
            if found:
                payload.arrival = self._copies.to_device(found)
                for place, tensor in zip(places, payload.arrival.tensors, strict=True):
                    payload.tensors[place] = tensor
        elif not self._on_cpu:  # data have come to the device by themselves, nothing has not
            for place, head in enumerate(description.tensors):
                come = payload.tensors[place]
                if come is not None and head.is_on_device and not head.is_meta:
                    payload.tensors[place] = come.to(self._device)
        tag = description.tag
        self._in_order.put(peer, number, lambda: self._mailbox.put(peer, tag, payload))

    def _listen(self, peer: int) -> None:
        set_current(self._device)  # or this thread pins memory through the first device
        far = None if self._on_cpu or self._copies else SideStream(self._device)
        try:
            first = bytearray(FIRST_BYTES)
            buffer = torch.frombuffer(first, dtype=torch.uint8)
            while True:
                self._receive_into(buffer, peer, _FIRST_TAG)
                head = head_of(first)
                number = number_of(head)
                if is_goodbye(head):
                    self._in_order.put(peer, number, lambda: self._mailbox.lose(peer, _CLOSED))
                    self._lines.wake()
                    return
                if num_bytes := bytes_of_all(head):
                    description, payload = out_of_one_piece(first[:num_bytes])
                else:
                    description, payload = self._receive_rest(peer, first, head, far)
                self._put(peer, number, description, payload)
                self._lines.wake()
        except RuntimeError as error:
            self.lose(peer, error)

    def _receive_rest(
        self, peer: int, first: bytearray, head: tuple[int, ...], far: SideStream | None
    ) -> tuple[Description, Payload]:
        """A message of which the data follow its first part."""
        shapes = None
        if count := shapes_that_follow(head):
            shapes = torch.empty(count, dtype=torch.int64, device="cpu")
            self._receive_into(shapes, peer, _DATA_TAG)
        message, structure = decode_first(first, head, shapes), None
        if message.structure_bytes >= 0:
            data = torch.empty(message.structure_bytes, dtype=torch.uint8, device="cpu")
            if message.structure_bytes:
                self._receive_into(data, peer, _DATA_TAG)
            structure = data.numpy().tobytes()
        flags = [each.requires_grad for each in message.tensors]
        payload = Payload([], flags, structure)
        arriving = []
        for each in message.tensors:
            if far is not None and each.is_on_device and each.num_bytes:
                tensor = self._receive_far(each, peer, far)
                arriving.append(tensor)
                payload.tensors.append(tensor)
            else:
                payload.tensors.append(self._receive_near(each, peer))
        if far is not None and arriving:
            payload.arrival = Arrival(self._device, far.mark(), arriving)
        return message, payload

    def _receive_far(self, head: TensorHead, peer: int, stream: SideStream) -> Tensor:
        """A tensor of a device, which comes on a stream beside the one that computes."""
        with stream.current():
            tensor = torch.empty(head.shape, dtype=head.dtype, device=self._device)
            group = self._groups.payload(peer, self.rank)
            group.recv([tensor], peer, _DATA_TAG).wait()  # the stream does
        return tensor

    def _receive_near(self, head: TensorHead, peer: int) -> Tensor | None:
        if head.dtype is None:
            return None
        if head.is_meta or not head.num_bytes:
            is_far = head.is_on_device and not self._on_cpu
            device = "meta" if head.is_meta else self._device if is_far else "cpu"
            return torch.empty(head.shape, dtype=head.dtype, device=device)
        if self._copies and head.is_on_device:
            tensor = self._copies.buffer(head.shape, head.dtype)
        else:
            tensor = torch.empty(head.shape, dtype=head.dtype, device="cpu")
        self._receive_into(tensor, peer, _DATA_TAG)
        return tensor

    def _receive_into(self, tensor: Tensor, peer: int, tag: int) -> None:
        self._groups.headers.recv([tensor], peer, tag).wait()


@dataclass(slots=True)
class _Message:
    """What is posted for a message, part by part."""

    first: FirstPart
    structure: bytes | None
    tensors: list[Tensor]


class _StagedSends:
    """Messages to one peer whose tensors are being copied to host memory.

    Args:
        transport: sends them.
        peer: to whom.
    """

    def __init__(self, transport: ProcessGroupTransport, peer: int) -> None:
        self._transport, self._peer = transport, peer
        self._waiting: queue.SimpleQueue[tuple[_Message, Any] | None] = queue.SimpleQueue()
        self._last: Any = None
        self._thread = threading.Thread(target=self._run, name=f"send-{peer}", daemon=True)
        self._thread.start()

    def put(self, message: _Message, copied: Any) -> None:
        """Sends a message once an event says that its copies are complete."""
        self._last = copied
        self._waiting.put((message, copied))

    def let_change(self) -> None:
        """The tensors may change in what this thread queues from now on."""
        if self._last is not None:
            self._last.wait()
            self._last = None

    def end(self, timeout_s: float) -> None:
        """Waits until all is sent.

        Raises:
            TransportError: the peer took nothing for so long.
        """
        self._waiting.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TransportError(f"rank {self._peer} took no messages for {timeout_s:g} s")

    def _run(self) -> None:
        try:
            while (found := self._waiting.get()) is not None:
                message, copied = found
                copied.synchronize()
                self._transport.post_and_wait(message, self._peer)
        except RuntimeError as error:
            self._transport.lose(self._peer, error)


class _SentWaits:
    """Waits for sends of gloo in a thread, as nothing ends such a wait early."""

    def __init__(self) -> None:
        self._begun: queue.SimpleQueue[tuple[Sequence[_Posted], Future[None]] | None]
        self._begun = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, posted: Sequence[_Posted], timeout_s: float) -> Future[None]:
        """Is done when all of them are, or has the error of the first that is not in time."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(timeout_s,), name="sent", daemon=True
            )
            self._thread.start()
        found: Future[None] = Future()
        self._begun.put((posted, found))
        return found

    def end(self) -> None:
        """The thread ends with what it waits for."""
        self._begun.put(None)

    def _run(self, timeout_s: float) -> None:
        while (begun := self._begun.get()) is not None:
            posted, found = begun
            try:
                for send in posted:
                    _wait(send, timeout_s)
                found.set_result(None)
            except RuntimeError as error:
                found.set_exception(error)


def _wait(send: _Posted, timeout_s: float) -> None:
    send.work.wait(timedelta(seconds=timeout_s))


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
