"""Pieces of memory that two processes share: one writes a message into a slot, the other reads it.

The writer owns *blocks* of shared memory (anonymous files that vanish with their last user, not
files in ``/dev/shm``). A block is divided into slots of one size; its first page has a byte per
slot: 1 while a message is in it. The writer sets it before it announces the message; the reader's
tensors lie in the slot itself, and when the last of them is gone the byte turns 0, which gives the
slot back. Nothing is copied at the reader, and no memory is taken or returned while sizes repeat.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from dataclasses import dataclass

_PAGE_BYTES = 4096
_BLOCK_BYTES = 1 << 20
_FREE, _TAKEN = 0, 1


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one message.

    Attributes:
        block: number of its block.
        index: of the slot in the block.
        memory: its bytes.
    """

    block: int
    index: int
    memory: memoryview


@dataclass(frozen=True, slots=True)
class BlockShape:
    """How a block is divided; writer and reader must agree on it."""

    slot_bytes: int
    num_slots: int

    @property
    def total_bytes(self) -> int:
        """Size of the block, the page of states included."""
        return _PAGE_BYTES + self.slot_bytes * self.num_slots


class SlotMemory:
    """Shared memory divided into slots.

    Args:
        fd: its file.
        shape: how it is divided.
    """

    def __init__(self, fd: int, shape: BlockShape) -> None:
        self.fd: int | None = fd
        self.shape = shape
        self._memory = memoryview(mmap.mmap(fd, shape.total_bytes))

    def forget_file(self) -> None:
        """Closes the file; the memory stays until its last user is gone."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def is_free(self, index: int) -> bool:
        """Whether nobody uses a slot."""
        return self._memory[index] == _FREE

    def take(self, index: int) -> memoryview:
        """Writer: a free slot's bytes; nobody else gets them until they are given back."""
        self._memory[index] = _TAKEN
        return self._slot(index)

    def read(self, index: int) -> memoryview:
        """Reader: a slot's bytes; the slot is given back when the last user of them is gone."""
        slot = self._slot(index)
        weakref.finalize(slot, self.give_back, index).atexit = False
        return slot

    def give_back(self, index: int) -> None:
        """Lets the slot be taken again."""
        self._memory[index] = _FREE

    def _slot(self, index: int) -> memoryview:
        start = _PAGE_BYTES + index * self.shape.slot_bytes
        return self._memory[start : start + self.shape.slot_bytes]


class SlotPool:
    """The writer's blocks for one reader; more are made when all slots of a size are taken."""

    def __init__(self) -> None:
        self.blocks: list[SlotMemory] = []
        self._of_size: dict[int, list[int]] = {}

    def take(self, num_bytes: int) -> Slot:
        """A free slot of at least that size.

        A block made for it is the last one in :attr:`blocks`, and the reader has to be told.

        Raises:
            MemoryError: the machine has none left.
        """
        slot_bytes = rounded_up(num_bytes)
        numbers = self._of_size.setdefault(slot_bytes, [])
        for number in reversed(numbers):  # the newest has most free slots
            block = self.blocks[number]
            for index in range(block.shape.num_slots):
                if block.is_free(index):
                    return Slot(number, index, block.take(index))
        shape = BlockShape(slot_bytes, min(_PAGE_BYTES, max(1, _BLOCK_BYTES // slot_bytes)))
        numbers.append(len(self.blocks))
        self.blocks.append(SlotMemory(_shared_file(shape.total_bytes), shape))
        return Slot(numbers[-1], 0, self.blocks[-1].take(0))

    def close(self) -> None:
        """Gives up the blocks; memory that readers still use stays theirs."""
        for block in self.blocks:
            block.forget_file()
        self.blocks, self._of_size = [], {}


def rounded_up(num_bytes: int) -> int:
    """The slot size for a message: four sizes per power of two, whole pages.

    >>> [rounded_up(n) for n in (1, 4096, 4097, 33000, 1 << 20)]
    [4096, 4096, 8192, 40960, 1048576]
    """
    step = max(_PAGE_BYTES, 1 << max(0, (max(1, num_bytes) - 1).bit_length() - 3))
    return -(-max(1, num_bytes) // step) * step


def _shared_file(num_bytes: int) -> int:
    """An anonymous file whose memory is there, so that writing cannot end in a bus error."""
    fd = os.memfd_create("lightning_gpp")
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise MemoryError(
                f"no {num_bytes} bytes of shared memory left for messages between stages"
            ) from error
        raise
    return fd
