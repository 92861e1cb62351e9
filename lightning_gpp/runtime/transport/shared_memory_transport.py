"""Messages between processes of one host: data in shared memory, announcements over sockets.

On CPUs this is several times faster than gloo, whose loopback connections copy every byte through
the kernel and wake a thread for it. A send copies the tensors once,
into a slot of shared memory; the receiver uses them where they lie. What is smaller than a slot is
worth goes with its announcement. There are no threads: what has arrived is looked at whenever this
rank sends, receives or flushes, and the sockets hold hundreds of announcements until then.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lightning_gpp.runtime.payload import Payload
from lightning_gpp.runtime.transport.message import (
    NUM_FIXED,
    Description,
    aligned,
    bytes_to_numbers,
    data_bytes,
    describe,
    in_one_piece,
    numbers_to_bytes,
    out_of_one_piece,
    piece_bytes,
    read_data,
    understand,
    write_data,
)
from lightning_gpp.runtime.transport.shared_slots import BlockShape, Slot, SlotMemory, SlotPool
from lightning_gpp.runtime.transport.transport import Mailbox, Tag, TransportError, late, not_taken

_PACKET = struct.Struct("4q")
_MESSAGE, _BLOCK, _GOODBYE, _SMALL = 1, 2, 3, 4
_SMALL_BYTES = 512
"""Messages of up to so many bytes go with their announcement; hundreds fit into a socket."""
_FD = struct.Struct("i")
_FD_SPACE = socket.CMSG_SPACE(_FD.size)
_CLOSE_TIMEOUT_S = 30.0


@dataclass(slots=True)
class _Peer:
    """One other rank.

    Attributes:
        connection: packets to it and from it.
        pool: slots that this rank writes for it.
        blocks: memory that it writes for this rank.
        unsent: packets that the socket had no room for, with the block whose file goes along.
        is_here: whether it may still send something.
    """

    connection: socket.socket
    pool: SlotPool = field(default_factory=SlotPool)
    blocks: list[SlotMemory] = field(default_factory=list)
    unsent: deque[tuple[bytes | bytearray, SlotMemory | None]] = field(default_factory=deque)
    is_here: bool = True


class SharedMemoryTransport:
    """A transport (:class:`~.transport.Transport`) between processes of one host.

    One thread at a time may use it, except for :meth:`abort`.

    Args:
        rank: this rank.
        sockets: connections to the others, see
            :func:`~lightning_gpp.runtime.processes.rank_sockets.connect_local`.
        timeout_s: limit of the wait for a peer that takes no packets.

    Attributes:
        rank: likewise.
        num_ranks: ranks in the world.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], timeout_s: float) -> None:
        self.rank, self.num_ranks = rank, len(sockets) + 1
        self._timeout_s = timeout_s
        self._mailbox = Mailbox()
        self._peers = {peer: _Peer(connection) for peer, connection in sorted(sockets.items())}
        self._rank_of_fd = {peer.connection.fileno(): r for r, peer in self._peers.items()}
        self._wake, self._woken = socket.socketpair()
        self._readable = select.poll()
        for fd in (*self._rank_of_fd, self._woken.fileno()):
            self._readable.register(fd, select.POLLIN)

    def send(self, payload: Payload, *, target: int, tag: Tag) -> None:
        """Copies the message into shared memory and announces it."""
        if target == self.rank:
            raise ValueError(f"rank {target} sends message {tag} to itself; hand it over locally")
        peer = self._peers[target]
        fixed, shapes = describe(payload, tag, on_cpu=True)
        if piece_bytes(payload, shapes) <= _SMALL_BYTES:
            peer.unsent.append((in_one_piece(_SMALL, payload, fixed, shapes), None))
            self._push(target)
            return
        num_blocks = len(peer.pool.blocks)
        head_bytes = aligned(8 * (NUM_FIXED + len(shapes)))
        slot = peer.pool.take(head_bytes + data_bytes(payload))
        if len(peer.pool.blocks) > num_blocks:
            block = peer.pool.blocks[-1]
            shape = block.shape
            peer.unsent.append((_packet(_BLOCK, shape.slot_bytes, shape.num_slots), block))
        _write(payload, [*fixed, *shapes], head_bytes, slot)
        peer.unsent.append((_packet(_MESSAGE, slot.block, slot.index, head_bytes), None))
        self._push(target)

    def receive(self, *, source: int, tag: Tag, timeout_s: float, purpose: str) -> Payload:
        """Takes in what arrives until the message is there."""
        deadline = time.monotonic() + timeout_s
        while (payload := self._mailbox.take(source, tag, purpose)) is None:
            self._push_all()
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise late(source, timeout_s, purpose)
            self._take_in(remaining_s)
        return payload

    def flush(self) -> None:
        """Waits until every announcement has left; the tensors were copied when they were sent."""
        self._flush(self._mailbox.check)

    def _flush(self, check: Callable[[], None]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while any(peer.unsent for peer in self._peers.values()):
            check()
            self._push_all()
            if time.monotonic() > deadline:
                slow = (rank for rank, peer in self._peers.items() if peer.unsent)
                raise not_taken(slow, self._timeout_s)
            self._take_in(0.001)

    def abort(self, error: BaseException) -> None:
        """Ends the waiting of this rank; any thread may call it."""
        self._mailbox.fail(error)
        with contextlib.suppress(OSError):  # closed already
            self._wake.send(b"!")

    def close(self) -> None:
        """Says goodbye to all peers and waits for theirs."""
        self._say_goodbye()
        self._flush(lambda: None)  # an error that has ended waits does not end this one
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        while left := [rank for rank, peer in self._peers.items() if peer.is_here]:
            if time.monotonic() > deadline:
                raise TransportError(
                    f"closing: rank {left[0]} did not end its messages within "
                    f"{_CLOSE_TIMEOUT_S:g} s"
                )
            self._take_in(0.1)
        self._release()

    def hang_up(self) -> None:
        """Ends the transport after a failure, without waiting for anybody."""
        self._say_goodbye()
        with contextlib.suppress(TransportError):  # a peer that has gone
            self._push_all()
        self._release()

    def _say_goodbye(self) -> None:
        for peer in self._peers.values():
            peer.unsent.append((_packet(_GOODBYE), None))

    def _release(self) -> None:
        for peer in self._peers.values():
            peer.connection.close()
            peer.pool.close()
        self._wake.close()
        self._woken.close()

    # Packets ---------------------------------------------------------------------------------

    def _push_all(self) -> None:
        for rank, peer in self._peers.items():
            if peer.unsent:
                self._push(rank)

    def _push(self, rank: int) -> None:
        """Sends as many packets as the socket takes."""
        peer = self._peers[rank]
        try:
            while peer.unsent:
                packet, block = peer.unsent[0]
                if block is None:
                    peer.connection.send(packet)
                else:
                    assert block.fd is not None, "a file is handed over once"
                    socket.send_fds(peer.connection, [packet], [block.fd])
                    block.forget_file()
                peer.unsent.popleft()
        except BlockingIOError:
            return  # the rest goes with the next call
        except OSError as error:
            peer.unsent.clear()
            if peer.is_here:
                raise TransportError(f"rank {rank} has gone ({error.strerror})") from error

    def _take_in(self, timeout_s: float) -> None:
        """Waits for packets and takes in one from every peer that has sent any."""
        for fd, _ in self._readable.poll(1e3 * min(timeout_s, 3600.0)):
            if fd == self._woken.fileno():
                self._woken.recv(1)
                continue
            rank = self._rank_of_fd[fd]
            self._take_packet(rank, self._peers[rank])

    def _take_packet(self, rank: int, peer: _Peer) -> None:
        """Takes one packet in, if there is one."""
        try:
            packet, ancillary, _, _ = peer.connection.recvmsg(_SMALL_BYTES, _FD_SPACE)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(rank, error.strerror or str(error))
            return
        if not packet:
            self._lose(rank, "its connection closed")
            return
        kind, *numbers = _PACKET.unpack_from(packet)
        if kind == _GOODBYE:
            self._lose(rank, "it closed its transport")
            return
        if kind == _BLOCK:
            (fd,) = _FD.unpack_from(ancillary[0][2])
            peer.blocks.append(SlotMemory(fd, BlockShape(numbers[0], numbers[1])))
            peer.blocks[-1].forget_file()
            return
        if kind == _SMALL:
            description, payload = out_of_one_piece(bytearray(packet))
        else:
            description, payload = _read(peer.blocks[numbers[0]], numbers[1], numbers[2])
        self._mailbox.put(rank, description.tag, payload)

    def _lose(self, rank: int, reason: str) -> None:
        peer = self._peers[rank]
        if peer.is_here:
            peer.is_here = False
            self._readable.unregister(peer.connection.fileno())
            self._mailbox.lose(rank, reason)


def _packet(*numbers: int) -> bytes:
    return _PACKET.pack(*numbers, *[0] * (4 - len(numbers)))


def _write(payload: Payload, numbers: list[int], head_bytes: int, slot: Slot) -> None:
    head = numbers_to_bytes(numbers)
    slot.memory[: len(head)] = head
    write_data(payload, slot.memory, head_bytes)


def _read(block: SlotMemory, index: int, head_bytes: int) -> tuple[Description, Payload]:
    memory = block.read(index)
    fixed = bytes_to_numbers(memory, 0, NUM_FIXED)
    shapes = bytes_to_numbers(memory, NUM_FIXED, fixed[-1])
    description = understand(fixed, shapes)
    return description, read_data(memory, head_bytes, description)
