"""The interface for messages between ranks, and the mailbox of received ones.

As bytes a message is a *body*, which is a pickled head that says what it is and the bytes of small
tensors; larger tensors follow one by one. gloo ends the process of a receiver whose buffer is too
small, so a receiver must know sizes first: it always waits for a *first part* of at most
:data:`FIRST_BYTES` (a shorter one is fine), which begins with the sizes of body and head. The body
follows in it, or apart where it does not fit. Of a tensor on the ``meta`` device type and shape
travel, and nothing else.
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
    """Received messages that nobody has asked for yet; thread-safe.

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
                raise TransportError(f"{purpose}: rank {source} has ended ({self._lost[source]})")
            return None

        if (payload := self.waits.until(find, timeout_s)) is None:
            what = f"nothing came from rank {source}"
            raise TransportError(too_late(purpose, what, timeout_s))
        return payload


FIRST_BYTES = 1 << 18
"""Most bytes of a first part: what follows costs a message more, what is in it a copy more."""

_MOST_HELD_BYTES = FIRST_BYTES // 2
_SIZES = struct.Struct("qq")


class TensorHead(NamedTuple):
    """Description of one tensor of a message.

    Attributes:
        is_on_device: whether it belongs on the device of the receiver, and not on its CPU.
        data: its bytes, if they do not follow the body.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_meta: bool
    is_on_device: bool
    data: bytearray | None = None

    @property
    def follows(self) -> bool:
        """Whether its bytes come after the body."""
        return self.data is None and not self.is_meta and math.prod(self.shape) > 0

    def empty(self, device: torch.device) -> Tensor:
        """Memory for it, with its numbers where they are known."""
        if self.data is not None:
            return torch.frombuffer(self.data, dtype=self.dtype).view(self.shape)
        return torch.empty(self.shape, dtype=self.dtype, device="meta" if self.is_meta else device)


class Head(NamedTuple):
    """Description of a message.

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
    is_held = is_held and num_bytes <= _MOST_HELD_BYTES
    told = tag, payload.structure, payload.requires_grad, heads, is_held
    head = pickle.dumps(told, pickle.HIGHEST_PROTOCOL)
    held = [memoryview(bits_of(each).numpy()) for each in data] if is_held else []  # type: ignore[arg-type]
    num_bytes = len(head) + (num_bytes if is_held else 0)
    sizes = _SIZES.pack(num_bytes, len(head))
    body: tuple[bytes | memoryview, ...] = (head, *held)
    fits = _SIZES.size + num_bytes <= FIRST_BYTES
    parts = [(sizes, *body)] if fits else [(sizes,), body]
    firsts = [torch.frombuffer(bytearray().join(part), dtype=torch.uint8) for part in parts]
    return firsts if is_held else [*firsts, *data]


GOODBYE = torch.frombuffer(bytearray(_SIZES.pack(0, 0)), dtype=torch.uint8)
"""A first part that says that nothing more follows."""


def body_in(first: bytearray) -> tuple[int, int, memoryview | None]:
    """Bytes of the body, 0 of :data:`GOODBYE`, and of its head; the body, unless it comes apart."""
    num_bytes, head_bytes = _SIZES.unpack_from(first)
    end = _SIZES.size + num_bytes
    body = memoryview(first)[_SIZES.size : end] if end <= FIRST_BYTES else None
    return num_bytes, head_bytes, body


def decode(body: memoryview, head_bytes: int) -> Head:
    """Parses the body of a message; keeps no reference to it."""
    tag, structure, requires_grad, heads, is_held = pickle.loads(body[:head_bytes])
    tensors: list[TensorHead | None] = []
    start = head_bytes
    for each in heads:
        found = None if each is None else TensorHead(*each)
        if is_held and found is not None and found.follows:
            end = start + math.prod(found.shape) * found.dtype.itemsize
            found, start = found._replace(data=bytearray(body[start:end])), end
        tensors.append(found)
    return Head(tag, structure, requires_grad, tensors)
