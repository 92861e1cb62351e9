from __future__ import annotations

import os

import pytest
import torch

from lightning_gpp.runtime.transport.shared_slots import SlotMemory, SlotPool, rounded_up


def reader_of(pool: SlotPool, number: int) -> SlotMemory:
    """The other end of a block, as a process that was given its file sees it."""
    block = pool.blocks[number]
    assert block.fd is not None
    reader = SlotMemory(os.dup(block.fd), block.shape)
    reader.forget_file()
    return reader


def test_what_is_written_is_read_in_place():
    pool = SlotPool()
    slot = pool.take(100)
    slot.memory[:3] = b"abc"
    assert bytes(reader_of(pool, slot.block).read(slot.index)[:3]) == b"abc"
    pool.close()


def test_a_slot_comes_back_when_its_last_tensor_is_gone():
    pool = SlotPool()
    slot = pool.take(64)
    reader = reader_of(pool, slot.block)
    whole = torch.frombuffer(reader.read(slot.index), dtype=torch.float32, count=16)
    row = whole.view(4, 4)[2].detach()
    del whole
    assert not pool.blocks[0].is_free(slot.index)
    assert pool.take(64).index != slot.index
    del row
    assert pool.blocks[0].is_free(slot.index)
    assert pool.take(64).index == slot.index
    pool.close()


def test_repeated_sizes_make_one_block():
    pool = SlotPool()
    for _ in range(1000):
        slot = pool.take(3 << 20)
        reader_of(pool, slot.block).give_back(slot.index)
    assert len(pool.blocks) == 1
    pool.close()


def test_taken_slots_are_never_handed_out_again():
    pool = SlotPool()
    taken = [pool.take(5000) for _ in range(300)]
    assert len({(slot.block, slot.index) for slot in taken}) == 300
    assert len(pool.blocks) > 1
    pool.close()


@pytest.mark.parametrize("num_bytes", [1, 4095, 4097, 10_000, 1_000_000, (1 << 26) + 1])
def test_slots_waste_little(num_bytes):
    assert num_bytes <= rounded_up(num_bytes) <= max(num_bytes + 4096, 1.25 * num_bytes)


def test_memory_outlives_the_writer():
    pool = SlotPool()
    slot = pool.take(64)
    slot.memory[:2] = b"ok"
    memory = reader_of(pool, slot.block).read(slot.index)
    del slot
    pool.close()
    assert bytes(memory[:2]) == b"ok"
