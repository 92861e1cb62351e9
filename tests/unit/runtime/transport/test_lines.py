"""Pieces over a connection that breaks, fills, and hands them over in parts.

sender ──▶ buffer of the system ──▶ buffer of the other system ──▶ reader
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from lightning_gpp.runtime.processes import rank_sockets
from lightning_gpp.runtime.transport.lines import TcpLines
from lightning_gpp.runtime.transport.process_transport import SMALL_BYTES
from lightning_gpp.runtime.transport.transport import TransportError


def nothing() -> None:
    """Nobody ends the wait."""


class End:
    """One end of a connection, and what came over it."""

    def __init__(self, connection: socket.socket) -> None:
        self.pieces: list[bytes] = []
        self.lost: list[tuple[int, str]] = []
        self.connection = connection
        self.lines = TcpLines(
            {1: connection},
            lambda rank, piece: self.pieces.append(bytes(piece)),
            lambda rank, reason: self.lost.append((rank, reason)),
        )

    def take_in_all(self) -> None:
        while self.lines.take_in(0):
            pass


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right, _ = listener.accept()
    both = End(left), End(right)
    yield both
    for end in both:
        end.lines.close()


def piece(number: int, num_bytes: int) -> bytearray:
    return bytearray(struct.pack("2q", number, num_bytes).ljust(num_bytes, b"%d" % (number % 10)))


def test_pieces_of_all_sizes_come_whole_and_in_order(ends: tuple[End, End]) -> None:
    left, right = ends
    sent = [piece(n, size) for n, size in enumerate((64, 17, SMALL_BYTES, 4096, 100_001, 64))]
    for each in sent:
        assert left.lines.has_room(1, len(each))
        left.lines.send(1, each)
        while len(right.pieces) <= struct.unpack_from("q", each)[0]:
            assert right.lines.take_in(10.0)
    assert right.pieces == sent


def test_all_that_has_room_is_on_its_way_though_nobody_reads(ends: tuple[End, End]) -> None:
    """The sender may end right after; what finds no room was never taken."""
    left, right = ends
    sent = []
    while left.lines.has_room(1, SMALL_BYTES):
        sent.append(piece(len(sent), SMALL_BYTES))
        left.lines.send(1, sent[-1])
        assert len(sent) < 10_000, "a buffer without an end"
    assert sent
    left.lines.flush(0.0, nothing)  # waits for nothing
    left.lines.close()
    while not right.lost:
        assert right.lines.take_in(10.0)
    assert right.pieces == sent


def test_a_connection_that_ends_within_a_piece_is_lost(ends: tuple[End, End]) -> None:
    left, right = ends
    left.connection.sendall(piece(0, 64) + piece(1, 4096)[:100])
    left.connection.close()
    while not right.lost:
        assert right.lines.take_in(10.0)
    assert right.lost == [(1, "its connection closed")]
    assert right.pieces == [piece(0, 64)]
    assert not right.lines.has_room(1, 64)


def test_sending_to_a_rank_that_has_gone_is_noted(ends: tuple[End, End]) -> None:
    left, right = ends
    right.lines.close()
    for number in range(1000):  # the first ones may leave before the end is known
        if not left.lines.has_room(1, 64):
            break
        left.lines.send(1, piece(number, 64))
        left.take_in_all()
    assert [rank for rank, _ in left.lost] == [1]
    left.lines.flush(0.0, nothing)


def test_what_waits_for_room_goes_when_there_is_some(ends: tuple[End, End]) -> None:
    """A piece larger than all buffers together."""
    left, right = ends
    large = piece(0, 1 << 26)
    left.lines.send(1, large)
    assert not left.lines.has_room(1, 64)
    while not right.pieces:
        left.lines.take_in(0)
        right.lines.take_in(0.01)
    left.lines.flush(10.0, nothing)
    assert right.pieces == [large]
    assert left.lines.has_room(1, 64)


@pytest.mark.parametrize("said", [b"", b"\1\0", b"\1\0\0\0" + b"x" * 16])
def test_who_does_not_know_the_token_is_nobody(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        assert rank_sockets._greeted(ours, b"y" * 16) is None


def test_an_error_ends_the_wait_for_room(ends: tuple[End, End]) -> None:
    left, _ = ends
    left.lines.send(1, piece(0, 1 << 26))  # nobody reads

    def check() -> None:
        raise RuntimeError("rank 2 failed")

    with pytest.raises(RuntimeError, match="rank 2 failed"):
        left.lines.flush(600.0, check)
    with pytest.raises(TransportError, match="sending: rank 1 took no messages within 0 s"):
        left.lines.flush(0.0, nothing)
