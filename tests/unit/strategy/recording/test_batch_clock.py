"""What batches took is said once, when enough of them are over."""

from __future__ import annotations

import pytest

from lightning_gpp.reports.plan.verdict import PlanVerdict
from lightning_gpp.strategy.recording import batch_clock
from lightning_gpp.strategy.recording.batch_clock import NUM_COUNTED, NUM_WARM_UP, BatchClock

VERDICT = PlanVerdict(2, 0.5, 1.0, 1, 2, True, 0.5, 1.0)


def test_the_median_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    durations_s = [9.0] * NUM_WARM_UP + [2.0] * (NUM_COUNTED - 3) + [1.0, 50.0, 50.0] + [7.0] * 5
    moments_s = [sum(durations_s[:count]) for count in range(len(durations_s) + 1)]
    times = iter(moments_s)
    monkeypatch.setattr(batch_clock.time, "monotonic", lambda: next(times))
    clock = BatchClock(VERDICT)
    told = [clock.begin() for _ in moments_s]
    assert [text is not None for text in told].index(True) == NUM_WARM_UP + NUM_COUNTED
    (text,) = filter(None, told)
    assert text.startswith(f"Measured: 2.00 s a batch (median of {NUM_COUNTED})")
