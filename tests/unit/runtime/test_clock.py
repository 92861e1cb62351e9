"""Offsets between clocks, found over a real transport between threads with clocks that differ."""

from __future__ import annotations

import time

from helpers.threads.start import of_ranks
from helpers.threads.transport import ThreadHub

from lightning_gpp.runtime.measured import ClockOffset, measure_offset


def offsets(skews_ns: list[int]) -> list[ClockOffset]:
    hub = ThreadHub(len(skews_ns))

    def run(rank: int) -> ClockOffset:
        skew_ns = skews_ns[rank]
        return measure_offset(
            hub.transport(rank), timeout_s=100.0, now_ns=lambda: time.monotonic_ns() + skew_ns
        )

    return of_ranks(len(skews_ns), run)


def test_clocks_that_differ_are_brought_together_within_the_error() -> None:
    skews = [0, 7_000_000_000, -3_000_000_123]
    found = offsets(skews)
    assert found[0] == ClockOffset(0, 0)
    for skew, offset in zip(skews[1:], found[1:]):
        assert 0 < offset.error_ns < 1_000_000_000
        assert abs(offset.offset_ns + skew) <= offset.error_ns


def test_a_clock_that_is_shared_has_no_offset() -> None:
    assert offsets([0] * 3) == [ClockOffset(0, 0)] * 3
