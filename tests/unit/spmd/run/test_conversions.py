"""Every change of placement gives what it claims, forwards and backwards."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from helpers.spmd_ranks import dealt, joined, on_threads, random_shares

from lightning_gpp.spmd.placement import PARTIAL, R_SAME, R_SUMMED, Placement, shard
from lightning_gpp.spmd.program import Method
from lightning_gpp.spmd.run.moves import Mover, Shards

CPU = torch.device("cpu")
WHOLE = (6, 4, 10)
PLACEMENTS = (
    *(R_SAME, R_SUMMED, PARTIAL),
    *(shard(0, 6), shard(0, 3), shard(1, 4), shard(2, 5), shard(2, 5, outer=2), shard(2, 1)),
    shard(2, 10),
)
METHODS = (Method.PADDED, Method.GROUPED)


def shares_of(num_devices: int, seed: int) -> Shards:
    draw = random.Random(seed)
    return Shards(random_shares(num_devices, draw))


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
@pytest.mark.parametrize("source", PLACEMENTS, ids=str)
def test_every_conversion(source: Placement, num_devices: int) -> None:
    shards = shares_of(num_devices, seed=num_devices)
    torch.manual_seed(0)
    value = torch.randn(WHOLE, dtype=torch.float64)
    gradient = torch.randn(WHOLE, dtype=torch.float64)
    for target, method in itertools.product(PLACEMENTS, METHODS):
        values = dealt(value, source, shards)
        gradients = dealt(gradient, target.dual, shards)

        def run(
            group,
            target=target,
            method=method,
            values=values,
            gradients=gradients,
        ):
            mover, gradient = Mover(group, shards, CPU), gradients[group.rank]
            converted = mover.move(values[group.rank], WHOLE, source, target, method, "x")
            back = mover.move(gradient, WHOLE, target.dual, source.dual, method, "x")
            return converted, back

        found = on_threads(num_devices, run)
        torch.testing.assert_close(joined([v for v, _ in found], target, shards), value)
        torch.testing.assert_close(joined([g for _, g in found], source.dual, shards), gradient)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.parametrize("placement", [p for p in PLACEMENTS if p != PARTIAL], ids=str)
def test_arguments_come_from_rank_0(placement: Placement, num_devices: int) -> None:
    shards = shares_of(num_devices, seed=7 * num_devices)
    torch.manual_seed(0)
    value = torch.randn(WHOLE, dtype=torch.float64)
    gradient = torch.randn(WHOLE, dtype=torch.float64)
    gradients = dealt(gradient, placement.dual, shards)

    def run(group):
        mover = Mover(group, shards, CPU)
        given = value if group.rank == 0 else None
        received = mover.from_root(given, WHOLE, torch.float64, placement, "x")
        return received, mover.to_root(gradients[group.rank], WHOLE, placement.dual, "x")

    found = on_threads(num_devices, run)
    torch.testing.assert_close(joined([v for v, _ in found], placement, shards), value)
    torch.testing.assert_close(found[0][1], gradient)
    assert all(back is None for _, back in found[1:])


@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_results_go_to_rank_0(placement: Placement, num_devices: int) -> None:
    shards = shares_of(num_devices, seed=3 * num_devices)
    torch.manual_seed(0)
    value = torch.randn(WHOLE, dtype=torch.float64)
    gradient = torch.randn(WHOLE, dtype=torch.float64)
    values = dealt(value, placement, shards)

    def run(group):
        mover = Mover(group, shards, CPU)
        given = mover.to_root(values[group.rank], WHOLE, placement, "x")
        whole = gradient if group.rank == 0 else None
        return given, mover.from_root(whole, WHOLE, torch.float64, placement.dual, "x")

    found = on_threads(num_devices, run)
    torch.testing.assert_close(found[0][0], value)
    assert all(other is None for other, _ in found[1:])
    torch.testing.assert_close(joined([g for _, g in found], placement.dual, shards), gradient)
