"""Moving messages between ranks: the interface, and the mailbox where they wait to be asked for."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

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
