"""Groups of gradients: none is worse than a sum per layer at the end, and what is best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.planner.step_time.gradients import (
    GradientPiece,
    Gradients,
    in_buckets,
    last_end_s,
)
from lightning_gpp.simulate.ssgd import MERGING, at_end, each_layer, merged

ROUNDING = 1 + 1e-12


def affine(startup_s: float, per_byte_s: float) -> Callable[[float], float]:
    return lambda size_bytes: startup_s + per_byte_s * size_bytes


@st.composite
def backwards(draw: st.DrawFn, max_layers: int = 7) -> Gradients:
    gaps = draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0]), min_size=1, max_size=max_layers))
    sizes = st.sampled_from([1.0, 10.0, 500.0])
    return backward_of(
        [GradientPiece(draw(sizes), ready_s) for ready_s in accumulate(gaps)],
        rest_s=draw(st.sampled_from([0.0, 1.0])),
    )


def backward_of(pieces: list[GradientPiece], rest_s: float = 0.0) -> Gradients:
    """With layers without gradients at its end."""
    return Gradients(pieces, pieces[-1].ready_s + rest_s)


sums = st.builds(affine, st.sampled_from([0.0, 0.01, 0.3, 2.0]), st.sampled_from([0.0, 1e-3, 0.1]))


def groupings(found: list[GradientPiece]) -> Iterator[list[GradientPiece]]:
    """All ways to join neighbours."""
    count = len(found)
    for cuts in (c for n in range(count) for c in combinations(range(1, count), n)):
        yield [
            GradientPiece(sum(p.size_bytes for p in found[a:b]), found[b - 1].ready_s)
            for a, b in pairwise((0, *cuts, count))
        ]


@given(backwards(), sums)
def test_merging_is_never_worse(found, sum_s):
    """MG-WFBP's rule beats a sum per layer and one of all, but not every other way to join."""
    ends = {name: last_end_s(rule(found, sum_s), sum_s) for name, rule in MERGING.items()}
    assert ends["merged"] <= ends["wait_free"] * ROUNDING
    total = sum(piece.size_bytes for piece in found.pieces)
    assert ends["merged"] <= (found.backward_s + sum_s(total)) * ROUNDING
    assert max(ends.values()) <= ends["at_end"] * ROUNDING
    best_s = min(last_end_s(groups, sum_s) for groups in groupings(found.pieces))
    assert best_s <= ends["merged"] * ROUNDING


@given(backwards(), sums, st.sampled_from(sorted(MERGING)))
def test_nothing_is_lost(found, sum_s, name):
    groups = MERGING[name](found, sum_s)
    assert sum(g.size_bytes for g in groups) == pytest.approx(
        sum(p.size_bytes for p in found.pieces)
    )
    assert found.pieces[-1].ready_s <= groups[-1].ready_s <= found.backward_s
    assert [g.ready_s for g in groups] == sorted(g.ready_s for g in groups)


THREE = backward_of([GradientPiece(1.0, 1.0), GradientPiece(1.0, 2.0), GradientPiece(1.0, 5.0)])


def test_the_rule_of_mg_wfbp():
    """Sums take 2 s and one per byte; layers come after 1, 2 and 5 s.

    seconds    0  1  2  3  4  5  6  7  8  9  10
    per layer     |1       |2       |3       |
    merged           |1+2        |3       |      waits for a second, saves two
    """
    sum_s = affine(2.0, 1.0)
    assert last_end_s(each_layer(THREE, sum_s), sum_s) == 10.0
    groups = merged(THREE, sum_s)
    assert [g.size_bytes for g in groups] == [2.0, 1.0]
    assert last_end_s(groups, sum_s) == 9.0
    slow = merged(THREE, affine(0.5, 1.0))  # half a second is not worth a second's wait
    assert [g.size_bytes for g in slow] == [1.0, 1.0, 1.0]


def test_buckets_of_a_fixed_size_may_be_slower_than_layers():
    sum_s = affine(0.1, 1.0)
    buckets = in_buckets(THREE, sum_s, 2.0)
    assert [(g.size_bytes, g.ready_s) for g in buckets] == [(2.0, 2.0), (1.0, 5.0)]
    waiting = backward_of([GradientPiece(1.0, 1.0), GradientPiece(1.0, 9.0)])
    assert last_end_s(in_buckets(waiting, sum_s, 2.0), sum_s) == pytest.approx(11.1)
    assert last_end_s(each_layer(waiting, sum_s), sum_s) == pytest.approx(10.1)


def test_at_end_nothing_begins_before_the_whole_backward_is_done():
    found = Gradients(THREE.pieces, backward_s=6.0)
    assert {piece.ready_s for piece in at_end(found, affine(1.0, 0.0))} == {6.0}
    assert last_end_s(at_end(found, affine(1.0, 0.0)), affine(1.0, 0.0)) == 9.0
