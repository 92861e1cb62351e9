"""Messages over ``torch.distributed``: gloo between CPUs, NCCL between GPUs.

One thread per peer listens all the time and puts what comes into the mailbox, so a posted send
always finds its receiver: no order of sends and receives can deadlock, and transfers overlap with
compute. The first part of a message (:mod:`.transport`), on a gloo group, says what it is and holds
small data; large tensors follow. Tensors on the CPU stay on gloo and on the CPU; those on GPUs take
the *payload* way:

- NCCL matches messages by order alone, and knows no complex numbers and short integers: tensors
  are bytes for it. Each direction between two ranks has a communicator of its own, and with it a
  stream, and the listener issues the receive when the sender announces that its send is queued. So
  all that a receive waits for, on any GPU, was queued before it. (torch has 32 streams per GPU: of
  more than about ten neighbours, some share one.)
- Otherwise tensors are staged through pinned host memory: a thread sends them once their copy is
  complete.

Neither way makes the host wait for the device, nor the stream that computes: what comes is written
on streams of their own, and who uses it waits for its
:class:`~lightning_gpp.runtime.device_copies.Arrival`. Only where much has been sent does the stream
wait for sends before the last ones, whose memory it needs.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpp.common.tensor_places import bits_of
from lightning_gpp.common.torch_device import is_accelerator, set_current, synchronize
from lightning_gpp.runtime.device_copies import Arrival, DeviceCopies, SideStream
from lightning_gpp.runtime.payload import Payload
from lightning_gpp.runtime.processes.groups import (
    RankDevice,
    abort_group,
    common_backend,
    of_every_rank,
    own_group,
    pipelines_of,
)
from lightning_gpp.runtime.transport.transport import (
    FIRST_BYTES,
    GOODBYE,
    Head,
    Mailbox,
    Tag,
    TensorHead,
    body_in,
    decode,
    encode,
)
from lightning_gpp.runtime.waits import (
    Background,
    TransportError,
    Waits,
    reason,
    start_thread,
    too_late,
)

_FIRST_TAG, _DATA_TAG = 1, 2
_CPU = torch.device("cpu")
_LISTEN_TIMEOUT = timedelta(days=30)
"""Of the group that waits for the next message, which comes when the user's code is done."""
_CLOSE_TIMEOUT_S = 30.0
_HANG_UP_TIMEOUT_S = 5.0
_LATER_S = 5.0
"""The wait of gloo ends after the one of the rank, whose error says more."""
CLOSED = "it closed its transport"
"""Why a peer that has said goodbye sends nothing more."""

_AHEAD = 4
"""Receives posted per peer for messages to come. While a message waits for its receive, gloo's
thread spins, and takes the processor from the thread that would post it."""

_MOST_POSTED, _MOST_POSTED_BYTES = 64, 1 << 24
"""Sends whose end nobody has looked at; what they hold is released when somebody does."""

_LAST_POSTED = 4
"""The newest of them, which are likely to be under way and are not waited for."""


class _Posted(NamedTuple):
    """A send under way; the tensor must live until it is done."""

    work: dist.Work
    tensor: Tensor
    target: int
    is_far: bool


class ProcessTransport:
    """A :class:`~lightning_gpp.runtime.transport.transport.Transport` over process groups.

    Args:
        device: where received tensors go.
        backend: for tensors on devices: ``"gloo"``, or that of the devices (``"nccl"``); None: the
            one by which the devices of all ranks can talk.
        timeout_s: limit of waits for peers that read nothing.
        waits: of this rank.
        num_pipelines: in as many parts ranks work for themselves; this is one of them.
        peers: ranks that this one hears and tells; by default all others.
        mailbox: gets what comes, and hears who has gone.

    Attributes:
        rank: this rank in its pipeline.
        num_ranks: ranks in it.
        waits: likewise.
    """

    def __init__(
        self,
        device: torch.device,
        backend: str | None = "gloo",
        timeout_s: float = 1800.0,
        waits: Waits | None = None,
        *,
        num_pipelines: int = 1,
        peers: Iterable[int] | None = None,
        mailbox: Any = None,
    ) -> None:
        pipelines = pipelines_of(num_pipelines)
        self.num_ranks = len(pipelines[0])
        self.rank = dist.get_rank() % self.num_ranks
        self.waits = waits or Waits()
        self._device, self._timeout_s = device, timeout_s
        self._control: Any = own_group(pipelines, "gloo", _LISTEN_TIMEOUT)
        self._payload: list[Any] = []  # to higher ranks, and to lower ones
        self._aborts: list[Callable[[], object]] = []
        if backend is None:
            backend = common_backend(of_every_rank(RankDevice.of(device)))
        if backend != "gloo":
            limit = timedelta(seconds=timeout_s)
            self._payload = [own_group(pipelines, backend, limit) for _ in range(2)]
            self._aborts = [partial(abort_group, group) for group in self._payload]
            self.waits.on_abort += self._aborts
        self._on_cpu = not is_accelerator(device)
        is_staged = not (self._payload or self._on_cpu or self.num_ranks == 1)
        self._copies = DeviceCopies(device) if is_staged else None
        self._copied: Any = None
        self._mailbox = mailbox or Mailbox(self.waits)
        self._posted: list[_Posted] = []
        self._posted_bytes = 0  # since the last release or flush
        self._sending: list[Future[None]] = []
        self._held_for: set[int] = set()
        self._closing = False
        others = {*range(self.num_ranks)} - {self.rank} if peers is None else peers
        self._senders = {
            peer: Background(f"send-{peer}", partial(set_current, device)) for peer in others
        }
        self._listeners = {
            peer: start_thread(f"listen-{peer}", self._listen, peer, stack_bytes=0)
            for peer in self._senders
        }

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """All ranks: makes the communicators of ranks that will exchange tensors of devices.

        NCCL makes them at the first message of a pair and direction, which both ranks then wait
        for. Here they do so in one order, before anything else is queued.

        Args:
            pairs: of ranks; the same on all of them.
        """
        if not self._payload:
            return
        token = torch.zeros(1, device=self._device)
        for source, target in sorted(set(pairs)):
            group = self._payload[target < source]
            if self.rank == source:
                group.send([token], target, _DATA_TAG).wait()
            elif self.rank == target:
                group.recv([token], source, _DATA_TAG).wait()
        synchronize(self._device)

    def send(self, payload: Payload, *, target: int, tag: Tag) -> None:
        """Posts the message and returns."""
        if target == self.rank:
            raise ValueError(f"rank {target} sends message {tag} to itself; hand it over locally")
        parts, copied = encode(payload, tag, on_cpu=self._on_cpu), None
        if len(parts) > 1 and any(tensor.device.type == "cpu" for tensor in parts[1:]):
            self._held_for.add(target)
        if self._copies is None:
            self._posted += self._post(parts, target)
            for part in parts:
                self._posted_bytes += part.nbytes
            if len(self._posted) > _MOST_POSTED or self._posted_bytes > _MOST_POSTED_BYTES:
                old, self._posted = self._posted[:-_LAST_POSTED], self._posted[-_LAST_POSTED:]
                self._posted_bytes = 0
                self._let_go(old)
            return
        far = [place for place, tensor in enumerate(parts) if tensor.device.type != "cpu"]
        if far:
            hosts, copied = self._copies.to_host([parts[place] for place in far])
            for place, host in zip(far, hosts, strict=True):
                parts[place] = host
            self._copied = copied
        self._senders[target].submit(lambda: self._post_staged(parts, target, copied))

    def receive(self, *, source: int, tag: Tag, timeout_s: float, purpose: str) -> Payload:
        """Waits until the message is in the mailbox, where listeners put it."""
        return self._mailbox.take(source, tag, timeout_s, purpose)

    def flush(self) -> None:
        """Waits until all posted tensors are on their way out; listeners take them at once.

        Of tensors on a device this thread's stream waits for that, not the host.
        """
        self._let_change()
        self._posted_bytes = 0
        if not self._held_for:
            return
        who, self._held_for = ", ".join(map(str, sorted(self._held_for))), set()
        late = too_late("sending", f"rank {who} took no messages", self._timeout_s)
        self._let_go(self._posted)
        sending, self._posted, self._sending = self._sending, [], []
        for sent in sending:
            self.waits.done(sent, self._timeout_s, late)
            try:
                sent.result()
            except RuntimeError as error:
                raise TransportError(f"a send failed ({reason(error)})") from error

    def _let_change(self) -> None:
        """This thread's stream waits for what it has sent."""
        if self._copied is not None:
            self._copied.wait()
            self._copied = None
        if self._payload:
            self._let_go([send for send in self._posted if send.is_far])
            self._posted = [send for send in self._posted if not send.is_far]

    def _let_go(self, posted: Iterable[_Posted]) -> None:
        """The stream waits for sends from devices; a thread per peer waits for those from CPUs."""
        waiting: dict[int, list[_Posted]] = {}
        for send in posted:
            if send.is_far:
                send.work.wait()
            else:
                waiting.setdefault(send.target, []).append(send)
        limit_s = self._timeout_s + _LATER_S
        self._sending = [each for each in self._sending if not each.done() or each.exception()]
        for peer, sends in waiting.items():
            self._sending.append(self._senders[peer].submit(partial(_wait, sends, limit_s)))

    def close(self) -> None:
        """Says goodbye to all peers and waits for theirs."""
        self._let_change()
        for peer in self._leave(_CLOSE_TIMEOUT_S):
            raise TransportError(
                f"closing connections: rank {peer} did not close its own within "
                f"{_CLOSE_TIMEOUT_S:g} s"
            )
        for group in (self._control, *self._payload):
            dist.destroy_process_group(group)
        self._forget()

    def hang_up(self, timeout_s: float = _HANG_UP_TIMEOUT_S) -> None:
        """Ends the transport after a failure: says goodbye to who is left, waits a little.

        A rank that has gone closes its connections; one that is left hangs up too. Listeners that
        outlive this would end the process with an abort.
        """
        if not self._leave(timeout_s):
            dist.destroy_process_group(self._control)
            self._forget()

    def _forget(self) -> None:
        """Lets go of the groups, whose threads and connections end with the last reference."""
        self.waits.on_abort = [end for end in self.waits.on_abort if end not in self._aborts]
        self._listeners, self._senders = {}, {}
        self._posted, self._payload, self._aborts = [], [], []
        del self._control

    def _leave(self, timeout_s: float) -> list[int]:
        """Says goodbye; the peers that did not in time."""
        self._closing = True
        deadline = time.monotonic() + timeout_s
        self._let_go([send for send in self._posted if not send.is_far])
        for sender in self._senders.values():
            sender.close(max(0.1, deadline - timeout_s / 2 - time.monotonic()))
        self._posted = []  # of a communicator that may be aborted
        for peer in self._listeners:
            with contextlib.suppress(RuntimeError):  # a peer that has gone
                self._posted += self._post([GOODBYE], peer)
        for send in self._posted:
            with contextlib.suppress(RuntimeError):
                _wait([send], max(0.1, deadline - time.monotonic()))
        for listener in self._listeners.values():
            listener.join(max(0.0, deadline - time.monotonic()))
        return [peer for peer, listener in self._listeners.items() if listener.is_alive()]

    def _post_staged(self, parts: list[Tensor], target: int, copied: Any) -> None:
        if copied is not None:
            copied.synchronize()
        try:
            _wait(self._post(parts, target), self._timeout_s)
        except RuntimeError as error:
            self._lose(target, reason(error))

    def _post(self, parts: list[Tensor], target: int) -> list[_Posted]:
        """Posts the parts of a message, between which no other may come."""
        posted = []
        for place, tensor in enumerate(parts):
            is_far = tensor.device.type != "cpu"
            group = self._payload[target < self.rank] if is_far else self._control
            # All ranks are in the group: their numbers are the same.
            sent = bits_of(tensor) if is_far else tensor
            work = group.send([sent], target, _DATA_TAG if place else _FIRST_TAG)
            posted.append(_Posted(work, sent, target, is_far))
        return posted

    # What comes ------------------------------------------------------------------------------

    def _lose(self, peer: int, why: str) -> None:
        """A peer sends, or takes, no more messages."""
        if not self._closing:
            self._mailbox.lose(peer, why)

    def _listen(self, peer: int) -> None:
        set_current(self._device)  # or this thread pins memory through the first device
        far = SideStream(self._device) if self._payload else None
        try:
            firsts = [bytearray(FIRST_BYTES) for _ in range(_AHEAD)]
            ahead = deque((first, self._receive_first(first, peer)) for first in firsts)
            while True:
                first, work = ahead.popleft()
                work.wait()
                num_bytes, head_bytes, body = body_in(first)
                if not num_bytes:
                    self._lose(peer, CLOSED)
                    return
                if body is None:
                    apart = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
                    self._control.recv([apart], peer, _DATA_TAG).wait()
                    body = memoryview(apart.numpy())  # type: ignore[arg-type]
                self._receive_message(decode(body, head_bytes), peer, far)
                ahead.append((first, self._receive_first(first, peer)))
        except Exception as error:  # a peer that has gone, or sends what nobody can read
            self._lose(peer, reason(error))

    def _receive_first(self, first: bytearray, peer: int) -> dist.Work:
        buffer = torch.frombuffer(first, dtype=torch.uint8)
        work: dist.Work = self._control.recv([buffer], peer, _FIRST_TAG)
        return work

    def _receive_message(self, head: Head, peer: int, far: SideStream | None) -> None:
        """What follows a head; then all of it goes where it belongs."""
        tensors: list[Tensor | None] = []
        moving: dict[int, Tensor] = {}
        for place, each in enumerate(head.tensors):
            if each is None:
                tensors.append(None)
                continue
            is_far = each.is_on_device and not (each.is_meta or self._on_cpu)
            tensors.append(tensor := self._receive_tensor(each, peer, far if is_far else None))
            if is_far:
                moving[place] = tensor
        payload = Payload(tensors, head.requires_grad, head.structure)
        if moving and self._copies is not None:
            payload.arrival = self._copies.to_device([*moving.values()])
        elif moving:
            assert far is not None, "ranks on devices have one or the other"
            payload.arrival = Arrival(far.mark(), [*moving.values()])
        if payload.arrival is not None:
            for place, tensor in zip(moving, payload.arrival.tensors, strict=True):
                tensors[place] = tensor
        self._mailbox.put(peer, head.tag, payload)

    def _receive_tensor(self, head: TensorHead, peer: int, far: SideStream | None) -> Tensor:
        if far is not None:
            with far.current():
                tensor = head.empty(self._device)
                if head.follows:  # the stream waits
                    self._payload[self.rank < peer].recv([bits_of(tensor)], peer, _DATA_TAG).wait()
            return tensor
        if not head.follows:
            return head.empty(_CPU)
        if self._copies is not None and head.is_on_device:
            tensor = self._copies.buffer(head.shape, head.dtype)
        else:
            tensor = head.empty(_CPU)
        self._control.recv([tensor], peer, _DATA_TAG).wait()
        return tensor


def _wait(posted: list[_Posted], timeout_s: float) -> None:
    for send in posted:
        send.work.wait(timedelta(seconds=timeout_s))
