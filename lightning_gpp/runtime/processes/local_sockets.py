"""Connections between the processes of one host: Unix sockets, which can hand over memory."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

_CONNECT_TIMEOUT_S = 30.0
_TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Address:
    """Where a rank listens."""

    host: str
    name: str
    token: bytes


def connect_local() -> dict[int, socket.socket] | None:
    """All ranks: a connection to every other rank, by rank; None where they share no host.

    Whether they do is found out by trying. The sockets keep packets apart (``SOCK_SEQPACKET``).
    """
    listener = _listen()
    mine = None
    if listener is not None:
        name = listener.getsockname().decode()
        mine = _Address(host_identity(), name, secrets.token_bytes(_TOKEN_BYTES))
    addresses: list[_Address | None] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, mine)
    sockets = None
    known = [address for address in addresses if address is not None]
    if len(known) == len(addresses) and len({address.host for address in known}) == 1:
        assert listener is not None
        with contextlib.suppress(OSError):
            sockets = _connect(listener, known)
    if listener is not None:
        listener.close()
    verdict = torch.tensor(int(sockets is not None))
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    if verdict.item() == 1:
        return sockets
    for connection in (sockets or {}).values():
        connection.close()
    return None


def _listen() -> socket.socket | None:
    """A socket without a file; None where the system has no such thing."""
    if not hasattr(socket, "SOCK_SEQPACKET") or not hasattr(socket, "AF_UNIX"):
        return None
    with contextlib.suppress(OSError):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(f"\0lightning_gpp-{secrets.token_hex(8)}")
            listener.listen(dist.get_world_size())
        except OSError:
            listener.close()
            raise
        return listener
    return None


def host_identity() -> str:
    """What tells this host from others; sockets without a file need one network name space too."""
    parts = [socket.gethostname()]
    for path in (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")):
        with contextlib.suppress(OSError):
            parts.append(str(path.readlink()) if path.is_symlink() else path.read_text().strip())
    return " ".join(parts)


def _connect(listener: socket.socket, addresses: list[_Address]) -> dict[int, socket.socket]:
    """Connects to the lower ranks and lets the higher ones connect; they prove who they are."""
    rank = dist.get_rank()
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    sockets: dict[int, socket.socket] = {}
    for lower in range(rank):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sockets[lower] = connection
        connection.settimeout(_CONNECT_TIMEOUT_S)
        connection.connect(addresses[lower].name.encode())
        connection.send(rank.to_bytes(4, "little") + addresses[lower].token)
    while len(sockets) < len(addresses) - 1:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        connection, _ = listener.accept()
        connection.settimeout(_CONNECT_TIMEOUT_S)
        greeting = connection.recv(4 + _TOKEN_BYTES)
        if hmac.compare_digest(greeting[4:], addresses[rank].token):
            sockets[int.from_bytes(greeting[:4], "little")] = connection
        else:
            connection.close()  # somebody else on this host
    for connection in sockets.values():
        connection.setblocking(False)
    return sockets
