"""What a message carries comes out as it went in."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_gpp.runtime.payload import pack, unpack


@pytest.mark.parametrize("is_coalesced", [False, True])
def test_sparse_tensors_travel_in_parts(is_coalesced: bool) -> None:
    """Row 2 is there twice, as the gradient of an embedding read twice is."""
    indices, values = torch.tensor([[2, 0, 2]]), torch.tensor([[1.0], [5.0], [2.0]])
    sparse = torch.sparse_coo_tensor(indices, values, (4, 1), check_invariants=True)
    sparse = sparse.coalesce() if is_coalesced else sparse
    payload = pack([None, {"momentum": sparse, "step": 3}, torch.ones(2)])
    assert all(t is not None and t.layout is torch.strided for t in payload.tensors)
    nothing, state, ones = unpack(payload)
    assert nothing is None
    assert state["step"] == 3
    assert torch.equal(ones, torch.ones(2))
    assert state["momentum"].is_coalesced() == is_coalesced
    assert state["momentum"].shape == (4, 1)
    assert state["momentum"].to_dense().flatten().tolist() == [5.0, 0.0, 3.0, 0.0]


@pytest.mark.parametrize("is_sorted", [False, True])
def test_packed_sequences_travel_in_parts(is_sorted: bool) -> None:
    """A ``PackedSequence`` can be made of nothing but tensors."""
    rows = [torch.ones(3, 2), torch.zeros(2, 2)]
    packed = pack_sequence(rows if is_sorted else rows[::-1], enforce_sorted=is_sorted)
    (found, _), number = unpack(pack([(packed, {"h": torch.ones(1)}), 3]))
    assert type(found) is PackedSequence
    assert number == 3
    for part, expected in zip(found, packed, strict=True):
        assert part is expected is None or torch.equal(part, expected)
