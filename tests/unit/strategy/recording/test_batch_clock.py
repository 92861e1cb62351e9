"""What batches took is said once, when enough of them are over."""

from __future__ import annotations

import pytest

from lightning_gpp.reports.plan.verdict import PlanVerdict
from lightning_gpp.strategy.recording import batch_clock
from lightning_gpp.strategy.recording.batch_clock import (
    FEWEST_COUNTED,
    LONG_S,
    NUM_COUNTED,
    NUM_WARM_UP,
    BatchClock,
)

VERDICT = PlanVerdict(2, 0.5, 1.0, 1, 2, True, 0.5, 1.0)


def told(
    monkeypatch: pytest.MonkeyPatch, durations_s: list[float], recorded: frozenset[int]
) -> list[str | None]:
    """What is said at the beginning of every batch, of which the last one only begins."""
    times = iter([sum(durations_s[:count]) for count in range(len(durations_s) + 1)] * 2)
    monkeypatch.setattr(batch_clock.time, "monotonic", lambda: next(times))
    clock = BatchClock(VERDICT)
    return [clock.begin(is_recorded=i in recorded) for i in range(len(durations_s) + 1)]


@pytest.mark.parametrize("recorded", [frozenset(), frozenset({3, 4, 6})])
def test_the_median_without_warm_up_and_recorded_batches(
    monkeypatch: pytest.MonkeyPatch, recorded: frozenset[int]
) -> None:
    durations_s = [0.9] * NUM_WARM_UP + [0.125] * 40
    durations_s[NUM_WARM_UP + 5] = 50.0  # a validation came between
    for index in recorded:
        durations_s[index] = 30.0
    found = told(monkeypatch, durations_s, recorded)
    ((place, text),) = [(i, text) for i, text in enumerate(found) if text is not None]
    assert place == NUM_WARM_UP + len(recorded) + NUM_COUNTED
    assert text.startswith(f"Measured: 125 ms a batch (median of {NUM_COUNTED}),")


def test_what_calls_took_is_the_part_of_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_clock.time, "monotonic", iter(range(100)).__next__)
    clock = BatchClock(VERDICT)
    for index in range(NUM_WARM_UP + NUM_COUNTED + 1):
        clock.begin(in_pipeline_s=0.25 * index)
    assert clock.found is not None
    assert (clock.found.batch_s, clock.found.pipeline_s) == (1.0, 0.25)


def test_of_long_batches_fewer_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    durations_s = [LONG_S] * (NUM_WARM_UP + NUM_COUNTED)
    found = told(monkeypatch, durations_s, frozenset())
    (place,) = (i for i, text in enumerate(found) if text is not None)
    assert place == NUM_WARM_UP + FEWEST_COUNTED


def test_nothing_is_said_of_a_short_training(monkeypatch: pytest.MonkeyPatch) -> None:
    durations_s = [0.1] * (NUM_WARM_UP + NUM_COUNTED - 1)
    assert told(monkeypatch, durations_s, frozenset()) == [None] * (len(durations_s) + 1)
