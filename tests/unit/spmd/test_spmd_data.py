"""Placements, graphs and programs as data."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.spmd.placement import PARTIAL, R_SAME, R_SUMMED, shard, units_per_device
from lightning_gpp.spmd.program import (
    Computation,
    Move,
    SpmdProgram,
    spmd_program_to_json,
)


@given(st.integers(0, 60), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_units_are_dealt_whole_and_close_to_the_shares(units: int, weights: list[int]) -> None:
    shares = tuple(weight / sum(weights) for weight in weights)
    counts = units_per_device(units, shares)
    assert sum(counts) == units and min(counts) >= 0
    for count, share in zip(counts, shares):
        assert count >= 1 or units < len(shares)
        # What a device has beyond its share went to those that would have had none.
        assert count - units * share < 1 + 1e-6
        assert units * share - count < 1 + len(shares)


@pytest.mark.parametrize("shares", [[0.5, 0.4], [1.5, -0.5], [1.0, 0.0], []])
def test_shares_are_parts_of_a_whole(shares: list[float]) -> None:
    with pytest.raises(ValueError, match="sum to 1"):
        units_per_device(4, tuple(shares))


def test_the_duals() -> None:
    assert [p.dual for p in (R_SAME, R_SUMMED, PARTIAL, shard(1, 4))] == [
        R_SAME,
        PARTIAL,
        R_SUMMED,
        shard(1, 4),
    ]


def test_a_program_as_a_document() -> None:
    rows = shard(0, 8)
    program = SpmdProgram(
        (0.25, 0.75),
        {"w": R_SAME},
        (
            Move("x", None, rows),
            Move("w", R_SAME, R_SUMMED),
            Computation("view", (rows,), (rows,)),
            Move("y", rows, None),
        ),
    )
    document = json.loads(spmd_program_to_json(program))
    assert document["shares"] == [0.25, 0.75]
    assert document["storage"].keys() == {"w"}
    ends = [(entry["value"], entry["source"]) for entry in document["instructions"][:2]]
    assert ends[0] == ("x", None) and ends[1][0] == "w"
    assert document["instructions"][2]["operator"] == "view"


def test_what_leaves_a_device_without_is_refused() -> None:
    with pytest.raises(ValueError, match="S0/2 has fewer units than the 3 devices"):
        SpmdProgram((0.2, 0.3, 0.5), {"w": shard(0, 2)}, ())
