"""Moving messages between ranks: the interface, its errors, and the mailbox both sides share."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
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


class Transport(Protocol):
    """Moves messages between ranks; knows neither schedules nor models.

    Contract (``tests/distributed/transport_contract.py``): sends do not wait for the receiver;
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
        """Waits until everything sent so far has left; its tensors may change afterwards."""

    def abort(self, error: BaseException) -> None:
        """Makes every waiting and every later ``receive`` raise ``error``."""

    def close(self) -> None:
        """Ends the transport in good order; all ranks call it."""


class Mailbox:
    """Messages that have arrived and were not yet asked for; safe between threads.

    Who waits for a message sleeps on a lock of its own, which is released when it comes: no other
    waiter wakes up, and nothing is taken again before it goes on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: dict[tuple[int, Tag], deque[Payload]] = {}
        self._waiting: dict[tuple[int, Tag], list[threading.Lock]] = {}
        self._lost: dict[int, str] = {}
        self._error: BaseException | None = None

    def put(self, source: int, tag: Tag, payload: Payload) -> None:
        """Adds a message that has arrived."""
        key = source, tag
        with self._lock:
            self._messages.setdefault(key, deque()).append(payload)
            waiting = self._waiting.pop(key, ())
        for waiter in waiting:
            waiter.release()

    def get(self, source: int, tag: Tag, timeout_s: float, purpose: str) -> Payload:
        """Takes a message out, waiting for it if need be.

        Raises:
            TransportError: it did not come in time, or its sender has gone.
        """
        key, deadline = (source, tag), time.monotonic() + timeout_s
        while True:
            with self._lock:
                payload = self._take(key, purpose)
                if payload is not None:
                    return payload
                waiter = threading.Lock()
                waiter.acquire()
                self._waiting.setdefault(key, []).append(waiter)
            if not waiter.acquire(timeout=max(0.0, deadline - time.monotonic())):
                with self._lock:
                    payload = self._take(key, purpose)
                if payload is None:
                    raise late(source, timeout_s, purpose)
                return payload

    def take(self, source: int, tag: Tag, purpose: str) -> Payload | None:
        """Takes a message out; None where it has not come yet.

        Raises:
            TransportError: its sender has gone.
        """
        with self._lock:
            return self._take((source, tag), purpose)

    def _take(self, key: tuple[int, Tag], purpose: str) -> Payload | None:
        if self._error is not None:
            raise self._error
        if queue := self._messages.get(key):
            payload = queue.popleft()
            if not queue:
                del self._messages[key]
            return payload
        if (source := key[0]) in self._lost:
            raise TransportError(f"{purpose}: rank {source} has gone ({self._lost[source]})")
        return None

    def lose(self, source: int, reason: str) -> None:
        """Notes that a peer will send nothing more."""
        with self._lock:
            self._lost.setdefault(source, reason)
            self._wake_all()

    def fail(self, error: BaseException) -> None:
        """Makes all waiting and later :meth:`get` calls raise ``error``; the first error stays."""
        with self._lock:
            self._error = self._error or error
            self._wake_all()

    def _wake_all(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for waiter in itertools.chain.from_iterable(waiting.values()):
            waiter.release()
