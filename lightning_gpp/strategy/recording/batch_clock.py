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
        self._num_begun = 0
        self._last_s: float | None = None
        self._took_s: list[float] = []

    def begin(self, *, is_recorded: bool = False) -> str | None:
        """A batch begins. What the batches before it took, once there are enough of them.

        Args:
            is_recorded: whether it is recorded: it takes longer, and is followed by the gathering
                and the picture of the record, so it does not count.
        """
        if len(self._took_s) == NUM_COUNTED:
            return None
        now_s = time.monotonic()
        if self._last_s is not None:
            self._took_s.append(now_s - self._last_s)
        self._num_begun += 1
        self._last_s = None if is_recorded or self._num_begun <= NUM_WARM_UP else now_s
        if len(self._took_s) < NUM_COUNTED:
            return None
        return self._verdict.measured_text(statistics.median(self._took_s), NUM_COUNTED)
