"""Messages between threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_gpp.runtime.payload import Payload
from lightning_gpp.runtime.transport.transport import Mailbox, Tag
from lightning_gpp.runtime.waits import Waits


class ThreadHub:
    """Joins the transports of ``num_ranks`` threads."""

    def __init__(self, num_ranks: int, condition: Callable[[], Any] | None = None) -> None:
        self.mailboxes = [Mailbox(Waits()) for _ in range(num_ranks)]
        if condition is not None:
            for mailbox in self.mailboxes:
                mailbox.waits._changed = condition()

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
        return self._hub.mailboxes[self._rank].take(source, tag, timeout_s, purpose)

    def flush(self) -> None:
        """Nothing to do: messages arrive as they are sent."""

    @property
    def waits(self) -> Waits:
        """Those of this rank."""
        return self._hub.mailboxes[self._rank].waits

    def close(self) -> None:
        """Tells the others that nothing more will come."""
        for mailbox in self._hub.mailboxes:
            mailbox.lose(self._rank, "it closed its transport")
