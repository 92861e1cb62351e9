"""Messages between threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from lightning_gpp.runtime.payload import Payload
from lightning_gpp.runtime.transport.transport import Mailbox, Tag, late


class WaitingMailbox(Mailbox):
    """A mailbox at which a thread can wait."""

    def __init__(self, condition: Callable[[], Any] = threading.Condition) -> None:
        super().__init__()
        self._changed = condition()

    def put(self, source: int, tag: Tag, payload: Payload) -> None:
        """Adds a message that has arrived."""
        with self._changed:
            super().put(source, tag, payload)
            self._changed.notify_all()

    def lose(self, source: int, reason: str) -> None:
        """Notes that a peer will send nothing more."""
        with self._changed:
            super().lose(source, reason)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Makes all waiting and later calls raise ``error``; the first error stays."""
        with self._changed:
            super().fail(error)
            self._changed.notify_all()

    def get(self, source: int, tag: Tag, timeout_s: float, purpose: str) -> Payload:
        """Takes a message out, waiting for it if need be.

        Raises:
            TransportError: it did not come in time, or its sender has gone.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (payload := self.take(source, tag, purpose)) is None:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise late(source, timeout_s, purpose)
                self._changed.wait(remaining_s)
            return payload


class ThreadHub:
    """Joins the transports of ``num_ranks`` threads."""

    def __init__(self, num_ranks: int, condition: Callable[[], Any] = threading.Condition) -> None:
        self.mailboxes = [WaitingMailbox(condition) for _ in range(num_ranks)]

    def transport(self, rank: int) -> ThreadTransport:
        """The transport of one rank."""
        return ThreadTransport(self, rank)


class ThreadTransport:
    """A transport between threads; copies nothing."""

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self._hub = hub
        self._rank = rank

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def num_ranks(self) -> int:
        """Number of threads that are joined."""
        return len(self._hub.mailboxes)

    def send(self, payload: Payload, *, target: int, tag: Tag) -> None:
        """Puts the message into the receiver's mailbox."""
        self._hub.mailboxes[target].put(self._rank, tag, payload)

    def receive(self, *, source: int, tag: Tag, timeout_s: float, purpose: str) -> Payload:
        """Takes a message out of the own mailbox."""
        return self._hub.mailboxes[self._rank].get(source, tag, timeout_s, purpose)

    def flush(self) -> None:
        """Nothing to do: messages arrive as they are sent."""

    def abort(self, error: BaseException) -> None:
        """Ends the waiting of this rank."""
        self._hub.mailboxes[self._rank].fail(error)

    def close(self) -> None:
        """Tells the others that nothing more will come."""
        for mailbox in self._hub.mailboxes:
            mailbox.lose(self._rank, "it closed its transport")
