"""Small messages between ranks over TCP connections, which the rank that waits reads by itself.

No thread is in between: gloo wakes its own thread for a message, that one a thread of Python, and
that one the rank. A line takes a message only where the system's buffer has room for all of it, so
that the message is on its way whatever both ranks do next: computing, or meeting others in a
collective. A rank that does not read gets no more than the buffers hold.
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
import termios
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lightning_gpp.runtime.transport.transport import not_taken

_HEAD = struct.Struct("2q")
_COUNT = struct.Struct("i")
_BUFFER_BYTES = 1 << 19
_FILLED = 0.5
"""How much of a buffer is used: the system counts what it spends on packets, too."""


@dataclass(slots=True)
class _TcpLine:
    """The connection to another rank.

    Attributes:
        connection: a stream.
        room: bytes that the system keeps for it at once.
        unsent: what of the last message the system had no room for after all.
        piece: what is being read: a head, then the whole piece, which begins with that head.
        filled: bytes of it that have come.
    """

    connection: socket.socket
    room: int
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    piece: bytearray = field(default_factory=lambda: bytearray(_HEAD.size))
    filled: int = 0


class TcpLines:
    """Sends pieces of bytes, each of which begins with a number and its own length.

    One thread at a time may use it, except for :meth:`wake`.

    Args:
        sockets: connections to the other ranks, see
            :func:`~lightning_gpp.runtime.processes.rank_sockets.connect_hosts`.
        on_piece: gets (rank, piece) of what has come.
        on_loss: gets (rank, reason) where a connection has ended.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        on_piece: Callable[[int, bytearray], None],
        on_loss: Callable[[int, str], None],
    ) -> None:
        self._lines = {rank: _opened(connection) for rank, connection in sockets.items()}
        self._rank_of_fd = {line.connection.fileno(): r for r, line in self._lines.items()}
        self._on_piece, self._on_loss = on_piece, on_loss
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._poll = select.poll()
        for fd in (*self._rank_of_fd, self._woken.fileno()):
            self._poll.register(fd, select.POLLIN)

    def has_room(self, rank: int, num_bytes: int) -> bool:
        """Whether a line is there and takes a piece of so many bytes at once."""
        line = self._lines.get(rank)
        if line is None or line.unsent:
            return False
        try:
            told = fcntl.ioctl(line.connection.fileno(), termios.TIOCOUTQ, bytes(_COUNT.size))
        except OSError:  # a system that does not tell
            return False
        waiting: int = _COUNT.unpack(told)[0]
        return num_bytes + waiting <= line.room

    def send(self, rank: int, piece: bytearray) -> None:
        """Sends a piece for which there is room; should it find none, it goes with later calls."""
        line = self._lines[rank]
        line.unsent = memoryview(piece)
        self._push(rank, line)

    def take_in(self, timeout_s: float) -> bool:
        """Waits until something has come, or some of what is unsent found room, or for a wake.

        Returns:
            False where the time was over.
        """
        events_of = self._poll.poll(1e3 * min(timeout_s, 3600.0))
        for fd, events in events_of:
            if fd == self._woken.fileno():
                self._woken.recv(4096)
                continue
            rank = self._rank_of_fd[fd]
            line = self._lines[rank]
            if events & select.POLLOUT:
                self._push(rank, line)
            if events & ~select.POLLOUT and rank in self._lines:
                self._read(rank, line)
        return bool(events_of)

    def flush(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Waits until all pieces have left.

        Args:
            timeout_s: seconds after which to give up.
            check: raises where there is no more reason to wait; :meth:`wake` lets it be called.

        Raises:
            TransportError: a rank took nothing for so long.
        """
        deadline = time.monotonic() + timeout_s
        while slow := [rank for rank, line in self._lines.items() if line.unsent]:
            check()
            if time.monotonic() > deadline:
                raise not_taken(slow, timeout_s)
            self.take_in(1.0)

    def wake(self) -> None:
        """Ends the wait of :meth:`take_in`; any thread may call it."""
        with contextlib.suppress(OSError):  # it will wake anyway, or is closed
            self._wake.send(b"!")

    def close(self) -> None:
        """Ends all connections."""
        for line in self._lines.values():
            line.connection.close()
        self._lines = {}
        self._wake.close()
        self._woken.close()

    def _push(self, rank: int, line: _TcpLine) -> None:
        try:
            while line.unsent:
                line.unsent = line.unsent[line.connection.send(line.unsent) :]
        except BlockingIOError:
            self._poll.modify(line.connection.fileno(), select.POLLIN | select.POLLOUT)
        except OSError as error:
            self._lose(rank, line, error.strerror or str(error))
        else:
            self._poll.modify(line.connection.fileno(), select.POLLIN)

    def _read(self, rank: int, line: _TcpLine) -> None:
        """Reads what has come, up to the end of a piece."""
        try:
            while True:
                room = memoryview(line.piece)[line.filled :]
                count = line.connection.recv_into(room)
                room.release()
                if not count:
                    self._lose(rank, line, "its connection closed")
                    return
                line.filled += count
                if line.filled < len(line.piece):
                    continue
                if line.filled > _HEAD.size:
                    break
                _, num_bytes = _HEAD.unpack(line.piece)
                line.piece.extend(bytes(num_bytes - _HEAD.size))
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(rank, line, error.strerror or str(error))
            return
        piece, line.piece, line.filled = line.piece, bytearray(_HEAD.size), 0
        self._on_piece(rank, piece)

    def _lose(self, rank: int, line: _TcpLine, reason: str) -> None:
        self._poll.unregister(line.connection.fileno())
        line.connection.close()
        del self._lines[rank]
        self._on_loss(rank, reason)


def _opened(connection: socket.socket) -> _TcpLine:
    """The system may keep less for a connection than is asked for."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    kept = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    return _TcpLine(connection, int(_FILLED * kept))
