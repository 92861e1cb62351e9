"""Costs between and beyond the micro-batch sizes that were measured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.cost.costs import fitted

SIZES = (1.0, 2.0, 4.0)

seconds = st.floats(1e-6, 1.0)


@given(st.tuples(seconds, seconds, seconds), st.floats(0.1, 1e6))
def test_what_took_time_takes_time_at_every_size(
    measured: tuple[float, float, float], size: float
) -> None:
    assert fitted(SIZES, measured, size) > 0


@given(st.tuples(seconds, seconds, seconds), st.floats(4.0, 1e6))
def test_beyond_the_largest_size_times_do_not_fall(
    measured: tuple[float, float, float], size: float
) -> None:
    smaller, larger = fitted(SIZES, measured, size), fitted(SIZES, measured, 2 * size)
    assert larger >= (1 - 1e-9) * smaller


def test_a_disturbed_measurement_does_not_make_larger_microbatches_free() -> None:
    assert fitted(SIZES, (1.0, 5.0, 1.5), 8.0) >= 1.5
    assert fitted(SIZES, (1.0, 5.0, 2.0), 8.0) < 5.0
