"""What batches really take, said once in a fit, beside what was predicted of them."""

from __future__ import annotations

import statistics
import time

from lightning_gpp.reports import PlanVerdict

NUM_WARM_UP = 3
"""Batches that are not counted: allocations, lazy optimizer state, loader workers that begin."""

NUM_COUNTED = 10
"""Batches of which the median is told; a validation between two of them does not move it."""


class BatchClock:
    """Notes when batches begin, until there are enough of them; then costs a comparison per batch.

    Args:
        verdict: what was predicted.
    """

    def __init__(self, verdict: PlanVerdict) -> None:
        self._verdict = verdict
        self._begun_s: list[float] = []

    def begin(self) -> str | None:
        """A batch begins. What the batches before it took, once there are enough of them."""
        if len(self._begun_s) > NUM_WARM_UP + NUM_COUNTED:
            return None
        self._begun_s.append(time.monotonic())
        if len(self._begun_s) <= NUM_WARM_UP + NUM_COUNTED:
            return None
        counted = self._begun_s[NUM_WARM_UP:]
        took_s = statistics.median(b - a for a, b in zip(counted, counted[1:], strict=False))
        return self._verdict.measured_text(took_s, NUM_COUNTED)
