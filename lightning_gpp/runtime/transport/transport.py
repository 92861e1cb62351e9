"""Moving messages between ranks: the interface, its errors, and the mailbox both sides share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from lightning_gpp.runtime.payload import Payload

Tag = tuple[int, int, int, int]
"""Identifies a message between two ranks."""


class TransportError(RuntimeError):
    """A message could not be sent or did not come; the text names peer, message and reason."""


def late(source: int, timeout_s: float, purpose: str) -> TransportError:
    """The error of a wait that took too long."""
    return TransportError(
        f"{purpose}: nothing came from rank {source} within {timeout_s:g} s; "
        "raise `timeout` if the work before it can take longer"
    )


def not_taken(ranks: Iterable[int], timeout_s: float) -> TransportError:
    """The error of a wait for peers that read nothing."""
    who = ", ".join(map(str, sorted(set(ranks))))
    return TransportError(
        f"sending: rank {who} took no messages within {timeout_s:g} s; "
        "raise `timeout` if what it does before can take longer"
    )


class Transport(Protocol):
    """Moves messages between ranks; knows neither schedules nor models.

    Contract (``tests/helpers/transport_contract.py``): sends do not wait for the receiver;
    messages with the same (source, target, tag) arrive in sending order; messages with different
    tags may be received in any order; shapes, types and structures may differ from message to
    message; ``receive`` gives up after ``timeout_s`` with a :class:`TransportError`; after
    :meth:`abort` every waiting or later ``receive`` raises the given error.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that can talk to each other."""

    def send(self, payload: Payload, *, target: int, tag: Tag) -> None:
        """Hands a message over. Its tensors must not be changed afterwards."""

    def receive(self, *, source: int, tag: Tag, timeout_s: float, purpose: str) -> Payload:
        """Waits for a message.

        Args:
            source: sending rank.
            tag: which message.
            timeout_s: seconds after which to give up.
            purpose: what for, for the error text (``"stage 2, action 2RF0<1"``).
        """

    def flush(self) -> None:
        """Waits until everything sent so far has left; its tensors may change afterwards.

        Of tensors on a device they may in what this thread queues there from now on.

        Raises:
            TransportError: a peer took nothing within the limit of the transport.
            BaseException: the error of :meth:`abort`.
        """

    def abort(self, error: BaseException) -> None:
        """Makes every waiting and every later ``receive``, and a ``flush`` that waits, raise it."""

    def close(self) -> None:
        """Ends the transport in good order; all ranks call it."""


class Mailbox:
    """Messages that have arrived and were not yet asked for; safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: dict[tuple[int, Tag], deque[Payload]] = {}
        self._lost: dict[int, str] = {}
        self._error: BaseException | None = None

    def put(self, source: int, tag: Tag, payload: Payload) -> None:
        """Adds a message that has arrived."""
        with self._lock:
            self._messages.setdefault((source, tag), deque()).append(payload)

    def take(self, source: int, tag: Tag, purpose: str) -> Payload | None:
        """Takes a message out; None where it has not come yet.

        Raises:
            TransportError: its sender has gone.
        """
        key = source, tag
        with self._lock:
            if self._error is not None:
                raise self._error
            if queue := self._messages.get(key):
                payload = queue.popleft()
                if not queue:
                    del self._messages[key]
                return payload
            if source in self._lost:
                raise TransportError(f"{purpose}: rank {source} has gone ({self._lost[source]})")
            return None

    def lose(self, source: int, reason: str) -> None:
        """Notes that a peer will send nothing more."""
        with self._lock:
            self._lost.setdefault(source, reason)

    def fail(self, error: BaseException) -> None:
        """Makes all later :meth:`take` calls raise ``error``; the first error stays."""
        with self._lock:
            self._error = self._error or error

    def check(self) -> None:
        """Raises the error of :meth:`fail`, if there was one."""
        if self._error is not None:
            raise self._error
