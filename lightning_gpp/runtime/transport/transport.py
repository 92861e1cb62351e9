"""Moving messages between ranks: the interface, and the mailbox where they wait to be asked for.

As bytes a message is a pickled head that says what it is, then its tensors. gloo ends the process
of a receiver whose buffer is too small, so a receiver must know sizes first: it always waits for a
*first part* of at most :data:`FIRST_BYTES` (a shorter one is fine), which begins with the size of
the head. The head follows in it, or apart where it does not fit. It holds small tensors, too;
otherwise they follow one by one. Of a tensor on the ``meta`` device type and shape travel, and
nothing follows.
"""

from __future__ import annotations

import math
import pickle
import struct
import threading
from collections import deque
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_gpp.common.tensor_places import bits_of
from lightning_gpp.runtime.payload import Payload
from lightning_gpp.runtime.waits import TransportError, Waits, too_late

Tag = tuple[int, int, int, int]
"""Identifies a message between two ranks."""


class Transport(Protocol):
    """Moves messages between ranks; knows neither schedules nor models.

    Contract (``tests/helpers/transport_contract.py``): sends do not wait for the receiver;
    messages with the same (source, target, tag) arrive in sending order; messages with different
    tags may be received in any order; shapes, types and structures may differ from message to
    message; ``receive`` gives up after ``timeout_s`` with a :class:`TransportError`; an error of
    its :class:`~lightning_gpp.runtime.waits.Waits` ends it, and ``flush``.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that can talk to each other."""

    def send(self, payload: Payload, *, target: int, tag: Tag) -> None:
        """Hands a message over. Its tensors must not be changed before :meth:`flush`."""

    def receive(self, *, source: int, tag: Tag, timeout_s: float, purpose: str) -> Payload:
        """Waits for a message.

        Args:
            source: sending rank.
            tag: which message.
            timeout_s: seconds after which to give up.
            purpose: what for, for the error text (``"stage 2, action 2RF0<1"``).
        """

    def flush(self) -> None:
        """Waits until the tensors of everything sent so far may change.

        Of tensors on a device they may in what this thread queues there from now on.

        Raises:
            TransportError: a peer took nothing within the limit of the transport.
        """


class Mailbox:
    """Messages that have arrived and were not yet asked for; safe between threads.

    Args:
        waits: of the rank.
    """

    def __init__(self, waits: Waits) -> None:
        self.waits = waits
        self._lock = threading.Lock()
        self._messages: dict[tuple[int, Tag], deque[Payload]] = {}
        self._lost: dict[int, str] = {}

    def put(self, source: int, tag: Tag, payload: Payload) -> None:
        """Adds a message that has arrived."""
        with self._lock:
            self._messages.setdefault((source, tag), deque()).append(payload)
        self.waits.wake()

    def lose(self, source: int, reason: str) -> None:
        """Notes that a peer will send nothing more."""
        self._lost.setdefault(source, reason)
        self.waits.wake()

    def take(self, source: int, tag: Tag, timeout_s: float, purpose: str) -> Payload:
        """Takes a message out, waiting for it if need be.

        Raises:
            TransportError: it did not come in time, or its sender has gone.
            BaseException: the error that ends all waits.
        """
        key = source, tag

        def find() -> Payload | None:
            with self._lock:
                if queue := self._messages.get(key):
                    payload = queue.popleft()
                    if not queue:
                        del self._messages[key]
                    return payload
            if source in self._lost:
                raise TransportError(f"{purpose}: rank {source} has gone ({self._lost[source]})")
            return None

        if (payload := self.waits.until(find, timeout_s)) is None:
            what = f"nothing came from rank {source}"
            raise TransportError(too_late(purpose, what, timeout_s))
        return payload


FIRST_BYTES = 1 << 18
"""Most bytes of a first part: what follows costs a message more, what is in it a copy more."""

_MOST_HELD_BYTES = FIRST_BYTES // 2
_SIZE = struct.Struct("q")


class TensorHead(NamedTuple):
    """Of a tensor in a message.

    Attributes:
        is_on_device: whether it belongs on the device of the receiver, and not on its CPU.
        data: its bytes, if they do not follow.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_meta: bool
    is_on_device: bool
    data: bytearray | None = None

    @property
    def follows(self) -> bool:
        """Whether its bytes come after the head."""
        return self.data is None and not self.is_meta and math.prod(self.shape) > 0

    def empty(self, device: torch.device) -> Tensor:
        """Memory for it, with its numbers where they are in the head."""
        if self.data is not None:
            return torch.frombuffer(self.data, dtype=self.dtype).view(self.shape)
        return torch.empty(self.shape, dtype=self.dtype, device="meta" if self.is_meta else device)


class Head(NamedTuple):
    """What a message is.

    Attributes:
        tag: of the message.
        structure: see :class:`~lightning_gpp.runtime.payload.Payload`, like ``requires_grad``.
        tensors: what is known of each; None where there is no tensor.
    """

    tag: Tag
    structure: bytes | None
    requires_grad: list[bool]
    tensors: list[TensorHead | None]


def encode(payload: Payload, tag: Tag, *, on_cpu: bool) -> list[Tensor]:
    """The parts of a message, of which the first one is bytes.

    Args:
        payload: of the message.
        tag: likewise.
        on_cpu: whether the sender computes on its CPU, so that what is there is on its device.
    """
    heads: list[tuple[object, ...] | None] = []
    data: list[Tensor] = []
    num_bytes, is_held = 0, True
    for given in payload.tensors:
        if given is None:
            heads.append(None)
            continue
        tensor = given.detach()
        is_here = tensor.device.type == "cpu"
        is_on_device = not payload.is_control and (on_cpu or not is_here)
        heads.append((tensor.dtype, tuple(tensor.shape), tensor.is_meta, is_on_device))
        if tensor.numel() and not tensor.is_meta:
            data.append(tensor.resolve_conj().resolve_neg().contiguous())
            num_bytes, is_held = num_bytes + tensor.nbytes, is_held and is_here
    held = None
    if is_held and num_bytes <= _MOST_HELD_BYTES:
        held = [bytearray(bits_of(each).numpy()) for each in data]
        data = []
    told = tag, payload.structure, payload.requires_grad, heads, held
    head = pickle.dumps(told, pickle.HIGHEST_PROTOCOL)
    size = _SIZE.pack(len(head))
    parts = [size + head] if _SIZE.size + len(head) <= FIRST_BYTES else [size, head]
    return [*[torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts], *data]


GOODBYE = torch.frombuffer(bytearray(_SIZE.pack(0)), dtype=torch.uint8)
"""A first part that says that nothing more follows."""


def head_in(first: bytearray) -> tuple[int, memoryview | None]:
    """Bytes of the head, 0 of :data:`GOODBYE`; the head, unless it comes apart."""
    (num_bytes,) = _SIZE.unpack_from(first)
    end = _SIZE.size + num_bytes
    return num_bytes, memoryview(first)[_SIZE.size : end] if end <= FIRST_BYTES else None


def decode(head: memoryview) -> Head:
    """What a message is, from the bytes of its head."""
    tag, structure, requires_grad, heads, held = pickle.loads(head)
    tensors: list[TensorHead | None] = []
    for each in heads:
        found = None if each is None else TensorHead(*each)
        if held is not None and found is not None and found.follows:
            found = found._replace(data=held.pop(0))
        tensors.append(found)
    return Head(tag, structure, requires_grad, tensors)
