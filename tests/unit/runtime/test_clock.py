"""Offsets between clocks, found over a real transport between threads with clocks that differ."""

from __future__ import annotations

import time
from collections.abc import Callable

from helpers.threads.start import of_ranks
from helpers.threads.transport import ThreadHub

from lightning_gpp.runtime.measured import ClockOffset, estimate_offset, measure_offset

Clock = tuple[Callable[[], int], str]
"""It, and the host that it is of."""


def test_the_quickest_exchange_counts_and_bounds_the_error() -> None:
    # rank 0 is 1000 ahead; the slow question took 80 of its 100 on the way there
    slow = 0, 1080, 1085, 105
    quick = 200, 1206, 1207, 211
    assert estimate_offset([slow, quick]) == ClockOffset(offset_ns=1001, error_ns=5)


def offsets(clocks: list[Clock]) -> list[ClockOffset]:
    hub = ThreadHub(len(clocks))

    def run(rank: int) -> ClockOffset:
        now_ns, host = clocks[rank]
        return measure_offset(hub.transport(rank), timeout_s=100.0, now_ns=now_ns, host=host)

    return of_ranks(len(clocks), run)


def skewed(skew_ns: int, host: str) -> Clock:
    return lambda: time.monotonic_ns() + skew_ns, host


def test_clocks_that_differ_are_brought_together_within_the_error() -> None:
    skews = [0, 7_000_000_000, -3_000_000_123]
    found = offsets([skewed(skew, str(skew)) for skew in skews])
    assert found[0] == ClockOffset(0, 0)
    for skew, offset in zip(skews[1:], found[1:]):
        assert 0 < offset.error_ns < 1_000_000_000
        assert abs(offset.offset_ns + skew) <= offset.error_ns


def test_ranks_of_one_host_share_the_clock() -> None:
    assert offsets([skewed(0, "host")] * 3) == [ClockOffset(0, 0)] * 3


def test_a_shared_name_is_not_believed_against_the_measurement() -> None:
    first, second = offsets([skewed(0, "host"), skewed(5_000_000_000, "host")])
    assert first == ClockOffset(0, 0)
    assert abs(second.offset_ns + 5_000_000_000) <= second.error_ns
