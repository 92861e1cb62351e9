"""Which micro-batch sizes are measured once more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.cost import OpProfile, Profile, disturbed, quicker


def profiles(*seconds: Sequence[float]) -> list[Profile]:
    """Of sizes 1, 2, 4, ...; a number for every operator."""
    return [
        Profile({str(name): OpProfile(s / 3, s * 2 / 3) for name, s in enumerate(each)}, 2**place)
        for place, each in enumerate(seconds)
    ]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=4))
def test_what_grows_with_the_samples_is_no_disturbance(lines: list[tuple[float, float]]) -> None:
    assert disturbed(profiles(*([a + b * n for a, b in lines] for n in (1, 2, 4)))) == []


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_slow_size_is_found_wherever_it_is(place: int) -> None:
    seconds = [[1 + 0.1 * n, 2.0, 0.0] for n in (1, 2, 4)]
    seconds[place] = [9 * s for s in seconds[place]]
    assert disturbed(profiles(*seconds)) == [place]


def test_a_single_slow_operator_is_none() -> None:
    assert disturbed(profiles([1.0, 9.0], [3.0, 9.0], [2.0, 9.0])) == []


def test_of_two_measurements_every_operator_counts_where_it_was_quicker() -> None:
    (one,), (other,) = profiles([1.0, 5.0]), profiles([2.0, 3.0])
    assert quicker(one, other) == profiles([1.0, 3.0])[0]
