"""How rank 0 and the other ranks get their lines: both sides prove that they know a secret."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import torch
import torch.distributed as dist

from lightning_gpp.runtime.processes.heartbeat_line import HeartbeatLine, start_thread
from lightning_gpp.runtime.processes.heartbeat_messages import CONNECT_S, hang_up
from lightning_gpp.runtime.processes.watched_rank import WatchedRank
from lightning_gpp.runtime.transport.transport import TransportError

_SECRET_BYTES = 32
_TEXT_BYTES = 512
_LOOK_S = 0.1


def accept(host: str, me: WatchedRank) -> list[HeartbeatLine]:
    """Rank 0: a connection to every other rank."""
    expected = set(range(1, dist.get_world_size()))
    if not expected:
        return []
    secret = secrets.token_bytes(_SECRET_BYTES)
    lines: dict[int, HeartbeatLine] = {}
    opened: list[Connection] = []
    lock = threading.Lock()

    def admit(connection: Connection) -> None:
        with contextlib.suppress(AuthenticationError, OSError, EOFError, ValueError):
            deliver_challenge(connection, secret)
            answer_challenge(connection, secret)
            peer = me.greet(connection)
            with lock:
                if peer.rank in expected:
                    lines.setdefault(peer.rank, HeartbeatLine(connection, peer))

    with _listen(host) as listener:
        address = listener.getsockname()
        _tell(json.dumps([*address[:2], secret.hex()]))
        deadline = time.monotonic() + CONNECT_S
        while len(lines) < len(expected) and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                opened.append(Connection(listener.accept()[0].detach()))
                start_thread("heartbeats-admit", admit, opened[-1])
    with lock:
        late = sorted(expected - set(lines))
        expected.clear()  # nobody is admitted from here on
    for connection in opened:
        if all(connection is not line.connection for line in lines.values()):
            hang_up(connection)
    if late:
        raise TransportError(
            f"ranks {late} did not connect to rank 0 at {address[0]}, port {address[1]}, within "
            f"{CONNECT_S:g} s; is a firewall between the hosts?"
        )
    return list(lines.values())


def connect(me: WatchedRank) -> HeartbeatLine:
    """Other ranks: a connection to rank 0."""
    host, port, secret = json.loads(_hear())
    try:
        end = socket.create_connection((host, port), timeout=CONNECT_S)
        end.settimeout(None)
        connection = Connection(end.detach())
        answer_challenge(connection, bytes.fromhex(secret))
        deliver_challenge(connection, bytes.fromhex(secret))
        return HeartbeatLine(connection, me.greet(connection))
    except (OSError, EOFError, ValueError, AuthenticationError) as error:
        raise TransportError(
            f"rank {me.rank} cannot connect to rank 0 at {host}, port {port}: {error}; is a "
            "firewall between the hosts?"
        ) from error


def _listen(host: str) -> socket.socket:
    """A listener at rank 0's address in the rendezvous; where that is another's, at its name's.

    Raises:
        TransportError: neither is an address of this host.
    """
    errors = []
    for name in (host, socket.gethostname()):
        try:
            found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
        except OSError as error:
            errors.append(f"{name}: {error}")
            continue
        for family, _, _, _, address in found:
            try:
                listener = socket.create_server(address[:2], family=family, backlog=64)
            except OSError as error:
                errors.append(f"{address[0]}: {error}")
                continue
            listener.settimeout(_LOOK_S)
            return listener
    raise TransportError(
        f"rank 0 can listen neither at {host!r} (MASTER_ADDR) nor at its own host name: "
        f"{'; '.join(errors)}"
    )


def _tell(text: str) -> None:
    """Rank 0: a short text for all, as numbers: nothing is unpickled."""
    dist.broadcast(torch.tensor(list(text.encode().ljust(_TEXT_BYTES)), dtype=torch.uint8), src=0)


def _hear() -> str:
    told = torch.empty(_TEXT_BYTES, dtype=torch.uint8)
    dist.broadcast(told, src=0)
    return told.numpy().tobytes().decode()
