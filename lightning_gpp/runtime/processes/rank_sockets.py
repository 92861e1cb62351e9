"""Connections of every rank to every other one: Unix sockets on one host, TCP between hosts."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONNECT_TIMEOUT_S = 30.0
_GREETING_TIMEOUT_S = 5.0
_TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Address:
    """Where a rank listens.

    Attributes:
        host: what the addresses of all ranks have in common; nobody tries where they differ.
        place: of the socket.
        token: proves that who connects was told of it.
    """

    host: str
    place: Any
    token: bytes


def connect_local() -> dict[int, socket.socket] | None:
    """All ranks: a connection to every other rank, by rank; None where they share no host.

    Whether they do is found out by trying. The sockets keep packets apart (``SOCK_SEQPACKET``).
    """
    return _connect_all(_listen_locally(), host_identity())


def connect_hosts(host: str) -> dict[int, socket.socket] | None:
    """All ranks: a connection by TCP to every other rank, by rank; None where one fails.

    Args:
        host: of rank 0; a rank listens where it would send to that host from.
    """
    listener = _listen_towards(host)
    is_here = listener is not None and _is_loopback(listener.getsockname()[0])
    sockets = _connect_all(listener, host_identity() if is_here else "")
    for connection in (sockets or {}).values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sockets


def own_address(host: str) -> str:
    """The address from which this process reaches a host; nothing is sent for it."""
    found = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    raise OSError(f"no way to {host!r}")


def _connect_all(listener: socket.socket | None, host: str) -> dict[int, socket.socket] | None:
    """All ranks: their connections; None on all where one has none."""
    mine = None
    if listener is not None:
        mine = _Address(host, listener.getsockname(), secrets.token_bytes(_TOKEN_BYTES))
    addresses: list[_Address | None] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, mine)
    sockets: dict[int, socket.socket] = {}
    is_connected = False
    known = [address for address in addresses if address is not None]
    if len(known) == len(addresses) and len({address.host for address in known}) == 1:
        assert listener is not None
        with contextlib.suppress(OSError):
            _connect(listener, known, sockets)
            is_connected = True
    if listener is not None:
        listener.close()
    verdict = torch.tensor(int(is_connected))
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    if verdict.item() == 1:
        return sockets
    for connection in sockets.values():
        connection.close()
    return None


def _listen_locally() -> socket.socket | None:
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


def _listen_towards(host: str) -> socket.socket | None:
    with contextlib.suppress(OSError):
        address = own_address(host)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=dist.get_world_size())
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def host_identity() -> str:
    """What tells this host from others; sockets without a file need one network name space too."""
    parts = [socket.gethostname()]
    for path in (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")):
        with contextlib.suppress(OSError):
            parts.append(str(path.readlink()) if path.is_symlink() else path.read_text().strip())
    return " ".join(parts)


def _connect(
    listener: socket.socket, addresses: list[_Address], sockets: dict[int, socket.socket]
) -> None:
    """Connects to the lower ranks and lets the higher ones connect; they prove who they are."""
    rank = dist.get_rank()
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    for lower in range(rank):
        sockets[lower] = _connected(listener, addresses[lower].place)
        sockets[lower].sendall(rank.to_bytes(4, "little") + addresses[lower].token)
    while len(sockets) < len(addresses) - 1:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        connection, _ = listener.accept()
        peer = _greeted(connection, addresses[rank].token)
        if peer is None:
            connection.close()  # somebody else
        else:
            sockets[peer] = connection
    for connection in sockets.values():
        connection.setblocking(False)


def _connected(listener: socket.socket, place: Any) -> socket.socket:
    """A connection to where another rank listens, which may be of another family by TCP."""
    if listener.type == socket.SOCK_STREAM:
        return socket.create_connection(place[:2], _CONNECT_TIMEOUT_S)
    connection = socket.socket(listener.family, listener.type)
    connection.settimeout(_CONNECT_TIMEOUT_S)
    try:
        connection.connect(place)
    except OSError:
        connection.close()
        raise
    return connection


def _greeted(connection: socket.socket, token: bytes) -> int | None:
    """The rank at the other end; None where that does not know the token."""
    greeting = b""
    connection.settimeout(_GREETING_TIMEOUT_S)
    with contextlib.suppress(OSError):
        while len(greeting) < 4 + len(token):
            part = connection.recv(4 + len(token) - len(greeting))
            if not part:
                return None
            greeting += part
    if hmac.compare_digest(greeting[4:], token):
        return int.from_bytes(greeting[:4], "little")
    return None
