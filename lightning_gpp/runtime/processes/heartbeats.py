"""Ranks hear at once who has gone, and within seconds who is frozen or cut off.

Rank 0 has a connection to every other rank, apart from all others and served by threads of its
own, so that it tells of its rank whatever the rank's main thread waits for. Both sides prove that
they know a secret (:func:`multiprocessing.connection.deliver_challenge`) before anything is read,
and what is read is JSON, never pickled. The secret travels over torch's process group, whose
rendezvous is trusted (``docs/trust.md``).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from functools import cache
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_gpp.runtime.processes.local_sockets import host_identity
from lightning_gpp.runtime.transport.transport import TransportError

BEAT_S = 1.0
"""Between two signs of life."""

SILENCE_S = 15.0
"""Without a sign of life a rank is taken for frozen or cut off."""

CONNECT_S = 60.0
"""Limit of connecting, which all ranks do at the same time."""

LEAVE_S = 5.0
"""Limit of waiting for the goodbye of the others."""

_SECRET_BYTES = 32
_TEXT_BYTES = 512
_LOOK_S = 0.1
_PROCESSES = Path("/proc")
_MAX_BYTES = 2**24
"""Of a message; a longer one is no message of ours."""

ENDED = "ended without a word: it was killed (out of memory?) or it crashed"
SILENT = f"gave no sign of life for {SILENCE_S:g} s: it is stopped or frozen, or the network is cut"

_BEAT: dict[str, Any] = {}
_GOODBYE = {"goodbye": True}


class Heartbeats:
    """This rank's connections: rank 0 has one to every other rank, the others one to rank 0.

    All ranks make theirs at the same time. The callbacks run in threads of this object.

    Args:
        host: address of rank 0 in torch's rendezvous; the listener is bound to it.
        on_message: called with a rank and what it sent.
        on_lost: called once with a rank that is gone and why, in words that follow "rank 3".

    Raises:
        TransportError: a rank did not connect in time.
    """

    def __init__(
        self,
        host: str,
        on_message: Callable[[int, dict[str, Any]], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._stop = threading.Event()
        me = _WatchedRank.mine()
        self._lines = {
            line.peer.rank: line for line in (_accept(host, me) if me.rank == 0 else [_connect(me)])
        }
        self._readers = [
            _start(f"heartbeats-of-{line.peer.rank}", self._read, line)
            for line in self._lines.values()
        ]
        self._beating = _start("heartbeats", self._beat)

    def send(self, message: dict[str, Any]) -> None:
        """Sends what JSON can hold: rank 0 to all others, the others to rank 0.

        A rank that has gone gets nothing; it is told to ``on_lost``.
        """
        for line in self._lines.values():
            line.send(message)

    def close(self, patience_s: float = LEAVE_S) -> None:
        """Leaves in good order: the others are not told that this rank is lost.

        Args:
            patience_s: seconds to wait for the others to leave, too.
        """
        self._stop.set()
        self.send(_GOODBYE)
        for line in self._lines.values():
            line.stop_sending()
        deadline = time.monotonic() + patience_s
        me = threading.current_thread()
        for thread in self._readers:
            if thread is not me:
                thread.join(max(0.0, deadline - time.monotonic()))
        for line in self._lines.values():
            _hang_up(line.connection)
        for thread in (*self._readers, self._beating):
            if thread is not me:
                thread.join()
        for line in self._lines.values():
            line.connection.close()

    def _read(self, line: _Line) -> None:
        try:
            while (message := line.receive()) != _GOODBYE:
                if message != _BEAT:
                    self._on_message(line.peer.rank, message)
            line.has_left = True
        except (OSError, EOFError, ValueError) as error:
            reason = "" if isinstance(error, EOFError | ConnectionResetError) else f" ({error})"
            self._lose(line, f"{ENDED}{reason}")

    def _beat(self) -> None:
        """Sends signs of life and counts how long there was none.

        Only time counts in which this process itself was running: who was stopped together with
        the others, or slept with the machine, has missed nothing.
        """
        before = time.monotonic()
        while not self._stop.wait(BEAT_S):
            now = time.monotonic()
            passed_s, before = min(now - before, 2 * BEAT_S), now
            for line in self._lines.values():
                line.send(_BEAT)
                line.silent_s += passed_s
                state = line.peer.state()
                if state is _ProcessState.GONE:
                    self._lose(line, ENDED)
                elif line.silent_s >= SILENCE_S and state is not _ProcessState.RUNNING:
                    # It would outlive the run, whose end this thread may not survive.
                    if state is _ProcessState.STOPPED and line.peer.was_started_for_run:
                        os.kill(line.peer.pid, signal.SIGKILL)
                    self._lose(line, SILENT)

    def _lose(self, line: _Line, why: str) -> None:
        if not (line.has_left or self._stop.is_set()):
            line.has_left = True
            self._on_lost(line.peer.rank, f"{line.peer.where} {why}")


class _ProcessState(Enum):
    """What is seen of a process of this host."""

    RUNNING = auto()
    STOPPED = auto()
    GONE = auto()
    UNSEEN = auto()


@dataclass(frozen=True, slots=True)
class _WatchedRank:
    """A rank at the other end.

    Attributes:
        rank: of the peer.
        pid: of its process.
        parent: of the process that started it.
        host: its name.
        identity: of the host and its process numbers, see :func:`_identity`.
    """

    rank: int
    pid: int
    parent: int
    host: str
    identity: str

    @classmethod
    def mine(cls) -> _WatchedRank:
        return cls(dist.get_rank(), os.getpid(), os.getppid(), socket.gethostname(), _identity())

    def greet(self, connection: Connection) -> _WatchedRank:
        """Tells the other end who this is; who that is.

        Raises:
            ValueError: it said something else.
        """
        connection.send_bytes(json.dumps(asdict(self)).encode())
        if not connection.poll(CONNECT_S):
            raise TimeoutError(f"no greeting within {CONNECT_S:g} s")
        match _receive(connection):
            case {
                "rank": int(rank),
                "pid": int(pid),
                "parent": int(parent),
                "host": str(host),
                "identity": str(identity),
            }:
                return _WatchedRank(rank, pid, parent, host, identity)
            case other:
                raise ValueError(f"a greeting was expected, got {other}")

    @property
    def where(self) -> str:
        return f"(process {self.pid} on {self.host})"

    @property
    def was_started_for_run(self) -> bool:
        """Whether this process, or the one that started this one, started it."""
        return self.parent in (os.getpid(), os.getppid())

    def state(self) -> _ProcessState:
        """A silent process that runs holds Python's lock in a long call (pickling gigabytes)."""
        if self.identity != _identity() or not _PROCESSES.is_dir():
            return _ProcessState.UNSEEN
        try:
            status = (_PROCESSES / str(self.pid) / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return _ProcessState.GONE
        except OSError:
            return _ProcessState.UNSEEN
        letter = status.rpartition(")")[2].split()[0]
        return {"Z": _ProcessState.GONE, "X": _ProcessState.GONE, "T": _ProcessState.STOPPED}.get(
            letter, _ProcessState.RUNNING
        )


@dataclass(slots=True, eq=False)
class _Line:
    """A connection to a rank that has proved who it is.

    Attributes:
        connection: carries JSON.
        peer: who is at the other end.
        silent_s: seconds without a sign of life.
        has_left: whether nothing more is expected.
    """

    connection: Connection
    peer: _WatchedRank
    silent_s: float = 0.0
    has_left: bool = False
    _sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: dict[str, Any]) -> None:
        # A full pipe would hold the sender up: the peer is frozen, which the silence tells.
        if not self._sending.acquire(timeout=BEAT_S):
            return
        try:
            with contextlib.suppress(OSError):  # the reader sees that the peer has gone
                self.connection.send_bytes(json.dumps(message).encode())
        finally:
            self._sending.release()

    def receive(self) -> dict[str, Any]:
        message = _receive(self.connection)
        self.silent_s = 0.0
        return message

    def stop_sending(self) -> None:
        """What was sent still arrives; so does what the other end sends."""
        with contextlib.suppress(OSError), _socket_of(self.connection) as end:
            end.shutdown(socket.SHUT_WR)


def _receive(connection: Connection) -> dict[str, Any]:
    message = json.loads(connection.recv_bytes(_MAX_BYTES))
    if not isinstance(message, dict):
        raise ValueError(f"a message must be a JSON object, got {type(message).__name__}")
    return message


def _hang_up(connection: Connection) -> None:
    """Ends a connection, and with it the reading of another thread."""
    with contextlib.suppress(OSError), _socket_of(connection) as end:
        end.shutdown(socket.SHUT_RDWR)


def _socket_of(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))


@cache
def _identity() -> str:
    """What tells the host and its process numbers from others."""
    with contextlib.suppress(OSError):
        return f"{host_identity()} {Path('/proc/self/ns/pid').readlink()}"
    return host_identity()


def _start(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    # Debuggers leave such a thread running while they hold the others at a breakpoint.
    thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
    thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
    thread.start()
    return thread


# Connecting --------------------------------------------------------------------------------------


def _accept(host: str, me: _WatchedRank) -> list[_Line]:
    """Rank 0: a connection to every other rank."""
    expected = set(range(1, dist.get_world_size()))
    if not expected:
        return []
    secret = secrets.token_bytes(_SECRET_BYTES)
    lines: dict[int, _Line] = {}
    opened: list[Connection] = []
    lock = threading.Lock()

    def admit(connection: Connection) -> None:
        with contextlib.suppress(AuthenticationError, OSError, EOFError, ValueError):
            deliver_challenge(connection, secret)
            answer_challenge(connection, secret)
            peer = me.greet(connection)
            with lock:
                if peer.rank in expected:
                    lines.setdefault(peer.rank, _Line(connection, peer))

    with _listen(host) as listener:
        address = listener.getsockname()
        _tell(json.dumps([*address[:2], secret.hex()]))
        deadline = time.monotonic() + CONNECT_S
        while len(lines) < len(expected) and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                opened.append(Connection(listener.accept()[0].detach()))
                _start("heartbeats-admit", admit, opened[-1])
    with lock:
        late = sorted(expected - set(lines))
        expected.clear()  # nobody is admitted from here on
    for connection in opened:
        if all(connection is not line.connection for line in lines.values()):
            _hang_up(connection)
    if late:
        raise TransportError(
            f"ranks {late} did not connect to rank 0 at {address[0]}, port {address[1]}, within "
            f"{CONNECT_S:g} s; is a firewall between the hosts?"
        )
    return list(lines.values())


def _connect(me: _WatchedRank) -> _Line:
    """Other ranks: a connection to rank 0."""
    host, port, secret = json.loads(_hear())
    try:
        end = socket.create_connection((host, port), timeout=CONNECT_S)
        end.settimeout(None)
        connection = Connection(end.detach())
        answer_challenge(connection, bytes.fromhex(secret))
        deliver_challenge(connection, bytes.fromhex(secret))
        return _Line(connection, me.greet(connection))
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
