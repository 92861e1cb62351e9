"""A connection between rank 0 and another rank, apart from all others."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from lightning_gpp.runtime.processes.heartbeat_messages import receive, socket_of
from lightning_gpp.runtime.processes.watched_rank import WatchedRank

_SEND_S = 1.0
"""Limit of handing over a message: where the pipe is full the silence tells of a frozen peer."""


@dataclass(slots=True, eq=False)
class HeartbeatLine:
    """A connection to a rank that has proved who it is.

    Attributes:
        connection: carries JSON.
        peer: who is at the other end.
        silent_s: seconds without a sign of life.
        has_left: whether nothing more is expected.
    """

    connection: Connection
    peer: WatchedRank
    silent_s: float = 0.0
    has_left: bool = False
    _sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: dict[str, Any]) -> None:
        """Hands a message over, unless the pipe is full."""
        if not self._sending.acquire(timeout=_SEND_S):
            return
        try:
            with contextlib.suppress(OSError):  # the reader sees that the peer has gone
                self.connection.send_bytes(json.dumps(message).encode())
        finally:
            self._sending.release()

    def receive(self) -> dict[str, Any]:
        """The next message, which is a sign of life."""
        message = receive(self.connection)
        self.silent_s = 0.0
        return message

    def stop_sending(self) -> None:
        """What was sent still arrives; so does what the other end sends."""
        with contextlib.suppress(OSError), socket_of(self.connection) as end:
            end.shutdown(socket.SHUT_WR)


def start_thread(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    """A thread that ends with the process."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    # Debuggers leave such a thread running while they hold the others at a breakpoint.
    thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
    thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
    thread.start()
    return thread
