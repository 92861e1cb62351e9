"""JSON over an authenticated connection: what heartbeats say."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from multiprocessing.connection import Connection
from typing import Any

CONNECT_S = 60.0
"""Limit of connecting, which all ranks do at the same time."""

_MAX_BYTES = 2**24
"""Of a message; a longer one is no message of ours."""


def receive(connection: Connection) -> dict[str, Any]:
    """The next message.

    Raises:
        ValueError: it is no JSON object.
    """
    message = json.loads(connection.recv_bytes(_MAX_BYTES))
    if not isinstance(message, dict):
        raise ValueError(f"a message must be a JSON object, got {type(message).__name__}")
    return message


def hang_up(connection: Connection) -> None:
    """Ends a connection, and with it the reading of another thread."""
    with contextlib.suppress(OSError), socket_of(connection) as end:
        end.shutdown(socket.SHUT_RDWR)


def socket_of(connection: Connection) -> socket.socket:
    """Another handle of its socket."""
    return socket.socket(fileno=os.dup(connection.fileno()))
