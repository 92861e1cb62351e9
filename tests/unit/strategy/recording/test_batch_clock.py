"""What batches took is said once, when enough of them are over."""

from __future__ import annotations

import pytest

from lightning_gpp.reports.plan.verdict import BatchTimes
from lightning_gpp.strategy.recording import batch_clock
from lightning_gpp.strategy.recording.batch_clock import (
    ENOUGH_S,
    FEWEST_COUNTED,
    NUM_WARM_UP,
    BatchClock,
)

BATCH_S = 0.125


def begun(
    monkeypatch: pytest.MonkeyPatch,
    durations_s: list[float],
    recorded: frozenset[int] = frozenset(),
) -> tuple[BatchClock, list[int]]:
    """The clock when so many batches are over, and the one at whose beginning it had enough."""
    times = iter([sum(durations_s[:count]) for count in range(len(durations_s) + 1)])
    monkeypatch.setattr(batch_clock.time, "monotonic", lambda: next(times))
    clock = BatchClock()
    places = range(len(durations_s) + 1)
    return clock, [i for i in places if clock.begin(is_recorded=i in recorded)]


@pytest.mark.parametrize("recorded", [frozenset(), frozenset({3, 4, 6})])
def test_the_median_without_warm_up_and_recorded_batches(
    monkeypatch: pytest.MonkeyPatch, recorded: frozenset[int]
) -> None:
    durations_s = [0.75] * NUM_WARM_UP + [BATCH_S] * 40
    durations_s[NUM_WARM_UP + 5] = 50.0  # a validation came between
    for index in recorded:
        durations_s[index] = 30.0
    clock, places = begun(monkeypatch, durations_s, recorded)
    num_counted = round(ENOUGH_S / BATCH_S)
    assert places == [NUM_WARM_UP + len(recorded) + num_counted]
    assert clock.found == BatchTimes(BATCH_S, num_counted)
    assert not clock.end()  # it was told


def test_what_calls_took_is_the_part_of_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_clock.time, "monotonic", iter([0, 9, 10, 12, 13]).__next__)
    clock = BatchClock()
    for in_pipeline_s in (0, 7, 7.25, 8.5, 8.875):
        clock.begin(in_pipeline_s=in_pipeline_s)
    # of 1, 2 and 1 seconds 0.25, 1.25 and 0.375: a batch that waits long has no longer a step
    assert clock.found == BatchTimes(1.0, 3, own_s=0.75)


def test_of_long_batches_fewer_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    _, places = begun(monkeypatch, [ENOUGH_S] * 20)
    assert places == [NUM_WARM_UP + FEWEST_COUNTED]


@pytest.mark.parametrize("num_counted", [FEWEST_COUNTED, FEWEST_COUNTED - 1])
def test_of_a_short_training_as_many_as_there_were(
    monkeypatch: pytest.MonkeyPatch, num_counted: int
) -> None:
    clock, places = begun(monkeypatch, [BATCH_S] * (NUM_WARM_UP + num_counted))
    assert not places
    is_enough = num_counted == FEWEST_COUNTED
    assert clock.end() == is_enough
    assert clock.found == (BatchTimes(BATCH_S, num_counted) if is_enough else None)
